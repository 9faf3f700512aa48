"""A Llama forward in plain JAX with a contiguous KV cache: what paging is measured against.

No pages, no tables, no scheduler: one static batch of equal prompts, a cache of the exact length it needs,
donated and updated in place. Its layouts are those that run fastest on XLA:CPU.

Axes: `B` rows, `T` prompt tokens, `S` cache tokens, `L` layers, `E` embed, `H` query heads, `K` KV heads,
`G` = H / K, `D` head dim, `F` ffn, `V` vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf_weights import LlamaShape

Params = dict[str, Any]
Cache = tuple[tuple[jax.Array, jax.Array], ...]  # a pair of [B, K, S, D] a layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How matrices lie in memory, and how few rows a product may have."""

    dtype: str  # of weights, activations and cache
    out_first: bool  # W[out, in] instead of W[in, out]
    min_rows: int  # rows are padded to this many


# With AVX-512 BF16, XLA:CPU has a slow path for one-row products in bf16, and two rows take the fast one.
# `contiguous.fastest_layout` measures whether that holds where it runs.
LAYOUTS = {
    "f32": Layout(dtype="float32", out_first=False, min_rows=1),
    "bf16": Layout(dtype="bfloat16", out_first=True, min_rows=2),
}


def pack_params(shape: LlamaShape, weights: dict[str, np.ndarray], layout: Layout) -> Params:
    """Fuses QKV and gate/up, and puts every matrix into the layout, on the device. Empties `weights` on the way."""

    def put(*names: str) -> jax.Array:
        matrix = np.concatenate([weights.pop(f"{name}.weight") for name in names], axis=0)
        if not layout.out_first:
            matrix = matrix.T
        return jnp.asarray(np.ascontiguousarray(matrix), dtype=layout.dtype)

    def vector(name: str) -> jax.Array:
        return jnp.asarray(weights.pop(f"{name}.weight"), dtype=jnp.float32)

    layers = []
    for index in range(shape.num_layers):
        at = f"model.layers.{index}"
        attn = f"{at}.self_attn"
        layers.append(
            {
                "attn_norm": vector(f"{at}.input_layernorm"),
                "qkv": put(f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"),
                "o": put(f"{attn}.o_proj"),
                "mlp_norm": vector(f"{at}.post_attention_layernorm"),
                "gate_up": put(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                "down": put(f"{at}.mlp.down_proj"),
            }
        )
    embed = jnp.asarray(weights.pop("model.embed_tokens.weight"), dtype=layout.dtype)  # [V, E]
    head = put("lm_head") if "lm_head.weight" in weights else None  # tied: the embedding is the head
    norm = vector("model.norm")
    assert not weights, f"left over: {sorted(weights)}"
    return {"embed": embed, "head": head, "norm": norm, "layers": layers}


def init_cache(shape: LlamaShape, layout: Layout, *, num_rows: int, num_tokens: int) -> Cache:
    """Allocates zeros for `num_rows` sequences of `num_tokens` tokens."""
    dims = (num_rows, shape.num_kv_heads, num_tokens, shape.head_dim)
    return tuple((jnp.zeros(dims, layout.dtype), jnp.zeros(dims, layout.dtype)) for _ in range(shape.num_layers))


def linear(x: jax.Array, weight: jax.Array, *, out_first: bool, min_rows: int) -> jax.Array:
    """x [N, in] → [N, out], with rows padded to `min_rows`."""
    num_rows = x.shape[0]
    if num_rows < min_rows:
        x = jnp.pad(x, ((0, min_rows - num_rows), (0, 0)))
    contracting = ((1,), (1,)) if out_first else ((1,), (0,))
    wide = jax.lax.dot_general(x, weight, (contracting, ((), ())), preferred_element_type=jnp.float32)
    return wide[:num_rows].astype(x.dtype)


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of table [V, E]; XLA:CPU would convert a bf16 table to float32 first, so its bits are gathered."""
    if table.dtype != jnp.bfloat16:
        return table[tokens]
    table, tokens = jax.lax.optimization_barrier((table, tokens))  # or a copy of the bits is hoisted out of the loop
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[tokens], jnp.bfloat16)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)


def _rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates the halves of x [B, heads, T, D] by positions [T]."""
    half = x.shape[-1] // 2
    frequencies = jnp.asarray(1.0 / theta ** (np.arange(half, dtype=np.float32) / half))
    angles = positions.astype(jnp.float32)[:, None] * frequencies  # [T, D / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of q [B, H, T, D] at positions [T] over keys and values [B, K, S, D]; returns [B, T, H * D]."""
    num_rows, num_heads, num_tokens, head_dim = q.shape
    num_kv_heads, span = keys.shape[1:3]
    q = q.reshape(num_rows, num_kv_heads, -1, head_dim)  # [B, K, G * T, D]: one product a KV head
    scores = jnp.einsum("bkqd,bksd->bkqs", q, keys).astype(jnp.float32) * head_dim**-0.5
    scores = scores.reshape(num_rows, num_heads, num_tokens, span)
    visible = jnp.arange(span) <= positions[:, None]  # [T, S]
    probs = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(q.dtype)
    probs = probs.reshape(num_rows, num_kv_heads, -1, span)
    out = jnp.einsum("bkqs,bksd->bkqd", probs, values).reshape(num_rows, num_heads, num_tokens, head_dim)
    return out.swapaxes(1, 2).reshape(num_rows, num_tokens, num_heads * head_dim)


def _forward(
    params: Params,
    cache: Cache,
    tokens: jax.Array,  # [B, T] int32
    start: jax.Array,  # [] int32, position of the first token
    last: jax.Array,  # [] int32, index in T of the token whose logits are wanted
    *,
    shape: LlamaShape,
    layout: Layout,
    span: int,
) -> tuple[jax.Array, Cache]:
    """Runs `tokens` through the model, reading the first `span` tokens of the cache.

    Returns:
        The greedy next token of each row, [B] int32, and the cache.
    """
    product = functools.partial(linear, out_first=layout.out_first, min_rows=layout.min_rows)
    num_rows, num_tokens = tokens.shape
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    positions = start + jnp.arange(num_tokens)
    x = lookup(params["embed"], tokens.reshape(-1))  # [B * T, E]
    new_cache = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        qkv = product(_rms_norm(x, layer["attn_norm"], shape.norm_eps), layer["qkv"])
        qkv = qkv.reshape(num_rows, num_tokens, heads + 2 * kv_heads, dim).swapaxes(1, 2)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        qk = _rope(qk, positions, shape.rope_theta)
        keys = jax.lax.dynamic_update_slice(keys, qk[:, heads:], (0, 0, start, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, 0, start, 0))
        new_cache.append((keys, values))
        out = _attend(qk[:, :heads], keys[:, :, :span], values[:, :, :span], positions)
        x = x + product(out.reshape(num_rows * num_tokens, heads * dim), layer["o"])
        gate, up = jnp.split(product(_rms_norm(x, layer["mlp_norm"], shape.norm_eps), layer["gate_up"]), 2, axis=-1)
        x = x + product(jax.nn.silu(gate) * up, layer["down"])
    x = x.reshape(num_rows, num_tokens, -1)[:, last]
    x = _rms_norm(x, params["norm"], shape.norm_eps)
    if params["head"] is not None:
        logits = product(x, params["head"])
    else:
        logits = linear(x, params["embed"], out_first=True, min_rows=layout.min_rows)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), tuple(new_cache)


@functools.partial(jax.jit, static_argnames=("shape", "layout"), donate_argnames=("cache",))
def prefill(
    params: Params, cache: Cache, tokens: jax.Array, prompt_len: jax.Array, *, shape: LlamaShape, layout: Layout
) -> tuple[jax.Array, Cache]:
    """Computes prompts [B, T], of which `prompt_len` tokens count; returns the first new token of each row."""
    start = jnp.zeros((), jnp.int32)
    return _forward(params, cache, tokens, start, prompt_len - 1, shape=shape, layout=layout, span=tokens.shape[1])


@functools.partial(jax.jit, static_argnames=("shape", "layout", "num_steps"), donate_argnames=("cache",))
def decode(
    params: Params,
    cache: Cache,
    token: jax.Array,  # [B] int32, the newest token of each row
    position: jax.Array,  # [] int32, its position
    *,
    shape: LlamaShape,
    layout: Layout,
    num_steps: int,
) -> tuple[jax.Array, Cache]:
    """Makes `num_steps` greedy tokens in one device loop; returns them as [num_steps, B]."""
    span = cache[0][0].shape[2]

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array, Cache]) -> tuple[jax.Array, jax.Array, Cache]:
        token, out, cache = carry
        last = jnp.zeros((), jnp.int32)
        token, cache = _forward(
            params, cache, token[:, None], position + index, last, shape=shape, layout=layout, span=span
        )
        return token, out.at[index].set(token), cache

    out = jnp.zeros((num_steps, token.shape[0]), jnp.int32)
    _, out, cache = jax.lax.fori_loop(0, num_steps, step, (token, out, cache))
    return out, cache

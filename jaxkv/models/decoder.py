"""The decoder that all families share: what differs between them is data in `ModelConfig`.

Axis letters: T tokens, L layers, E embed, H query heads, K KV heads, G = H // K, D head dim, F ffn, V vocabulary,
X experts.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.config import ModelConfig
from jaxkv.models.layers import (
    ACTIVATIONS,
    Attend,
    PerLayer,
    linear,
    lookup,
    param,
    read,
    rms_norm,
    run_layers,
    soft_cap,
    unrounded,
)
from jaxkv.models.moe import mixture
from jaxkv.models.rope import Phases, phases_of_all, rotate

NO_WINDOW = 1 << 30  # keys: what a layer without a window sees, where its neighbours have one


class DecoderLayer(nnx.Module):
    """One block. Q, K and V are fused per KV head, gate and up per ffn unit, so that both shard on their first axes."""

    def __init__(self, cfg: ModelConfig, dtype: jnp.dtype, stack: tuple[int, ...] = ()):
        k, g, d, e, f = cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads, cfg.head_dim, cfg.embed, cfg.ffn

        def p(*shape: int, axes: tuple[str | None, ...], is_matrix: bool = False) -> nnx.Param:
            return param(*stack, *shape, dtype=dtype, axes=(*("layers",) * len(stack), *axes), is_matrix=is_matrix)

        self.cfg = cfg
        if cfg.pre_norm:
            self.attn_norm, self.mlp_norm = p(e, axes=(None,)), p(e, axes=(None,))
        if cfg.post_norm:
            self.attn_out_norm, self.mlp_out_norm = p(e, axes=(None,)), p(e, axes=(None,))
        self.qkv = p(k, g + 2, d, e, axes=("kv_heads", None, None, None), is_matrix=True)
        # One axis for all heads: with few KV heads as one of its own, XLA:TPU lays a layer's weights out anew.
        self.out = p(e, k * g * d, axes=(None, "heads"), is_matrix=True)
        if cfg.qkv_bias:
            self.qkv_bias = p(k, g + 2, d, axes=("kv_heads", None, None))
        if cfg.out_bias:
            self.out_bias = p(e, axes=(None,))
        if cfg.qk_norm == "head":
            self.q_norm, self.k_norm = p(d, axes=(None,)), p(d, axes=(None,))
        elif cfg.qk_norm == "width":
            self.q_norm = p(k, g, d, axes=("kv_heads", None, None))
            self.k_norm = p(k, d, axes=("kv_heads", None))
        if cfg.experts is not None:
            x = cfg.experts.num
            self.router = p(x, e, axes=(None, None))
            self.gate_up = p(x, 2, f, e, axes=("experts", None, None, None), is_matrix=True)
            self.down = p(x, e, f, axes=("experts", None, None), is_matrix=True)
            return
        self.gate_up = p(2, f, e, axes=(None, "ffn", None), is_matrix=True)
        self.down = p(e, f, axes=(None, "ffn"), is_matrix=True)
        if cfg.mlp_bias:
            self.gate_up_bias = p(2, f, axes=(None, "ffn"))
            self.down_bias = p(e, axes=(None,))

    def __call__(
        self, x: jax.Array, pool: Any, layer: jax.Array, phases: Phases, window: jax.Array | int | None, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """`x [T, E]` -> `[T, E]`, with this layer's K/V of the T tokens written into the pool."""
        cfg = self.cfg
        attended, pool = self.attention(
            self.norm(x, self.attn_norm) if cfg.pre_norm else x, pool, layer, phases, window, attend
        )
        x = self.add(x, self.norm(attended, self.attn_out_norm) if cfg.post_norm else attended)
        mixed = self.mlp(self.norm(x, self.mlp_norm) if cfg.pre_norm else x)
        return self.add(x, self.norm(mixed, self.mlp_out_norm) if cfg.post_norm else mixed), pool

    def norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        return rms_norm(x, weight[...], self.cfg.norm_eps, plus_one=self.cfg.norm_plus_one)

    def add(self, x: jax.Array, more: jax.Array) -> jax.Array:
        """The residual stream and what a block adds to it."""
        if self.cfg.residual_scale == 1.0:
            return x + more
        return x + (more.astype(jnp.float32) * self.cfg.residual_scale).astype(x.dtype)

    def attention(
        self, x: jax.Array, pool: Any, layer: jax.Array, phases: Phases, window: jax.Array | int | None, attend: Attend
    ) -> tuple[jax.Array, Any]:
        cfg, groups = self.cfg, self.cfg.num_heads // self.cfg.num_kv_heads
        qkv = linear(x, self.qkv[...])  # [T, K, G + 2, D]
        if cfg.qkv_bias:
            qkv = qkv + read(self.qkv_bias[...])[None]
        q, k, v = qkv[:, :, :groups], qkv[:, :, groups], qkv[:, :, groups + 1]
        if cfg.qk_norm != "none":
            q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        if cfg.qkv_clip is not None:
            q, k, v = (jnp.clip(each, -cfg.qkv_clip, cfg.qkv_clip) for each in (q, k, v))
        q = rotate(q.reshape(x.shape[0], cfg.num_heads, cfg.head_dim), phases)
        attended, pool = attend(
            layer, q, rotate(k, phases), v, pool, scale=cfg.scale, window=window, soft_cap=cfg.soft_cap
        )
        out = linear(attended.reshape(x.shape[0], -1), self.out[...])
        return (out + read(self.out_bias[...])[None] if cfg.out_bias else out), pool

    def mlp(self, x: jax.Array) -> jax.Array:
        cfg, activation = self.cfg, ACTIVATIONS[self.cfg.activation]
        if cfg.experts is not None:
            return mixture(x, self.router[...], self.gate_up[...], self.down[...], cfg.experts, activation)
        weight = self.gate_up[...]
        gate_up = linear(x, weight, out_dtype=unrounded(weight, x.dtype))  # [T, 2, F]
        if cfg.mlp_bias:
            gate_up = gate_up + read(self.gate_up_bias[...]).astype(gate_up.dtype)[None]
        out = linear((activation(gate_up[:, 0]) * gate_up[:, 1]).astype(x.dtype), self.down[...])
        return out + read(self.down_bias[...])[None] if cfg.mlp_bias else out


class Decoder(nnx.Module):
    """Token ids to hidden states and logits. `per_layer` keeps one module per layer, see `layers.run_layers`."""

    Layer: ClassVar[type[DecoderLayer]] = DecoderLayer  # what a family may replace

    def __init__(self, cfg: ModelConfig, dtype: jnp.dtype, *, per_layer: bool):
        self.cfg, self.per_layer = cfg, per_layer
        self.embed = param(cfg.vocab_size, cfg.embed, dtype=dtype, axes=("vocab", None))
        if per_layer:
            self.layers: Any = nnx.List([self.Layer(cfg, dtype) for _ in range(cfg.num_layers)])
        else:
            self.layers = self.Layer(cfg, dtype, (cfg.num_layers,))
        self.final_norm = param(cfg.embed, dtype=dtype, axes=(None,))
        if not cfg.tied:
            self.head = param(cfg.vocab_size, cfg.embed, dtype=dtype, axes=("vocab", None), is_matrix=True)

    def hidden(self, token_ids: jax.Array, positions: jax.Array, pool: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """int32 `token_ids [T]` at `positions [T]` -> final hidden states `[T, E]` and the pool with their K/V."""
        cfg = self.cfg
        rope_of, window_of = _phases_by_layer(cfg, positions), _windows_by_layer(cfg)

        def body(block: DecoderLayer, layer: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            return block(*carry, layer, rope_of(layer), window_of(layer), attend)

        x = lookup(self.embed[...], token_ids, as_bits=self.per_layer)
        if cfg.embed_scale != 1.0:
            x = x * jnp.asarray(cfg.embed_scale, x.dtype)
        x, pool = run_layers(self.layers, body, (x, pool), cfg.num_layers)
        return rms_norm(x, self.final_norm[...], cfg.norm_eps, plus_one=cfg.norm_plus_one), pool

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`hidden [T, E]` -> float32 `[T, V]`."""
        head = self.embed[...] if self.cfg.tied else self.head[...]
        if self.per_layer:  # multiplied as their matrices are
            head = jax.tree.map(lambda array: PerLayer([array], jnp.int32(0)), head)
        logits = linear(hidden, head, out_dtype=jnp.dtype(jnp.float32))
        return soft_cap(logits / self.cfg.logit_scale if self.cfg.logit_scale != 1.0 else logits, self.cfg.logit_cap)


def _phases_by_layer(cfg: ModelConfig, positions: jax.Array) -> Callable[[jax.Array], Phases]:
    """The phases of a layer; they are computed once for each rope of the model."""
    ropes = tuple(dict.fromkeys(cfg.ropes))
    cos, sin = phases_of_all(ropes, positions)
    if len(ropes) == 1:
        return lambda layer: (cos[0], sin[0])
    index = jnp.asarray([ropes.index(rope) for rope in cfg.ropes], jnp.int32)
    return lambda layer: (cos[index[layer]], sin[index[layer]])


def _windows_by_layer(cfg: ModelConfig) -> Callable[[jax.Array], jax.Array | int | None]:
    """The window of a layer: a constant where all have the same, else a number the compiler does not know."""
    windows = set(cfg.windows)
    if len(windows) == 1:
        (window,) = windows
        return lambda layer: window
    by_layer = jnp.asarray([NO_WINDOW if window is None else window for window in cfg.windows], jnp.int32)
    return lambda layer: by_layer[layer]

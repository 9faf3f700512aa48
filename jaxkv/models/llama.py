"""Llama: SmolLM2, Llama 2 and 3, Mistral without a window.

Axis letters: T tokens, L layers, E embed, H query heads, K KV heads, G = H // K, D head dim, F ffn, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.models.layers import Attend, Rope, linear, lookup, param, read, rms_norm, rotate, run_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Geometry of a Llama-shaped model."""

    num_layers: int
    embed: int
    num_heads: int
    num_kv_heads: int  # as computed with, copies included
    head_dim: int
    ffn: int
    vocab_size: int
    max_len: int  # positions the model was trained for
    norm_eps: float
    rope: Rope
    tied: bool  # the head is the embedding
    attention_bias: bool = False  # biases on q, k, v and o
    mlp_bias: bool = False
    kv_copies: int = 1  # times each KV head of the checkpoint is there, see `kv_heads`

    @property
    def as_stored(self) -> "LlamaConfig":
        """The geometry of the checkpoint."""
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // self.kv_copies, kv_copies=1)


class LlamaLayer(nnx.Module):
    """One block. Q, K and V are fused per KV head, gate and up per ffn unit, so that both shard on their first axes."""

    def __init__(self, cfg: LlamaConfig, dtype: jnp.dtype, stack: tuple[int, ...] = ()):
        k, g, d, e, f = cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads, cfg.head_dim, cfg.embed, cfg.ffn

        def p(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param:
            return param(*stack, *shape, dtype=dtype, axes=(*("layers",) * len(stack), *axes))

        self.cfg = cfg
        self.attn_norm = p(e, axes=(None,))
        self.qkv = p(k, g + 2, d, e, axes=("kv_heads", None, None, None))
        self.out = p(e, k, g * d, axes=(None, "kv_heads", None))
        self.mlp_norm = p(e, axes=(None,))
        self.gate_up = p(2, f, e, axes=(None, "ffn", None))
        self.down = p(e, f, axes=(None, "ffn"))
        if cfg.attention_bias:
            self.qkv_bias = p(k, g + 2, d, axes=("kv_heads", None, None))
            self.out_bias = p(e, axes=(None,))
        if cfg.mlp_bias:
            self.gate_up_bias = p(2, f, axes=(None, "ffn"))
            self.down_bias = p(e, axes=(None,))

    def __call__(
        self, x: jax.Array, pool: Any, layer: jax.Array, phases: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, Any]:
        """`x [T, E]` -> `[T, E]`, with this layer's K/V of the T tokens written into the pool."""
        attended, pool = self.attention(
            rms_norm(x, self.attn_norm[...], self.cfg.norm_eps), pool, layer, phases, attend
        )
        x = x + attended
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.cfg.norm_eps)), pool

    def attention(
        self, x: jax.Array, pool: Any, layer: jax.Array, phases: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, Any]:
        num_tokens, d, groups = x.shape[0], self.cfg.head_dim, self.cfg.num_heads // self.cfg.num_kv_heads
        qkv = linear(x, self.qkv[...])  # [T, K, G + 2, D]
        if self.cfg.attention_bias:
            qkv = qkv + read(self.qkv_bias[...])[None]
        q = qkv[:, :, :groups].reshape(num_tokens, self.cfg.num_heads, d)
        k, v = qkv[:, :, groups], qkv[:, :, groups + 1]
        attended, pool = attend(layer, rotate(q, phases), rotate(k, phases), v, pool)
        out = linear(attended, self.out[...], num_in=2)
        return (out + read(self.out_bias[...])[None] if self.cfg.attention_bias else out), pool

    def mlp(self, x: jax.Array) -> jax.Array:
        gate_up = linear(x, self.gate_up[...])  # [T, 2, F]
        if self.cfg.mlp_bias:
            gate_up = gate_up + read(self.gate_up_bias[...])[None]
        out = linear(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], self.down[...])
        return out + read(self.down_bias[...])[None] if self.cfg.mlp_bias else out


class Llama(nnx.Module):
    """Token ids to hidden states and logits. `per_layer` keeps one module per layer, see `layers.run_layers`."""

    def __init__(self, cfg: LlamaConfig, dtype: jnp.dtype, *, per_layer: bool):
        self.cfg, self.per_layer = cfg, per_layer
        self.embed = param(cfg.vocab_size, cfg.embed, dtype=dtype, axes=("vocab", None))
        if per_layer:
            self.layers: Any = nnx.List([LlamaLayer(cfg, dtype) for _ in range(cfg.num_layers)])
        else:
            self.layers = LlamaLayer(cfg, dtype, (cfg.num_layers,))
        self.final_norm = param(cfg.embed, dtype=dtype, axes=(None,))
        if not cfg.tied:
            self.head = param(cfg.vocab_size, cfg.embed, dtype=dtype, axes=("vocab", None))

    def hidden(self, token_ids: jax.Array, positions: jax.Array, pool: Any, attend: Attend) -> tuple[jax.Array, Any]:
        """int32 `token_ids [T]` at `positions [T]` -> final hidden states `[T, E]` and the pool with their K/V."""
        phases = self.cfg.rope.phases(positions)

        def body(block: LlamaLayer, layer: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            return block(*carry, layer, phases, attend)

        embedded = lookup(self.embed[...], token_ids, as_bits=self.per_layer)
        x, pool = run_layers(self.layers, body, (embedded, pool), self.cfg.num_layers)
        return rms_norm(x, self.final_norm[...], self.cfg.norm_eps), pool

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`hidden [T, E]` -> float32 `[T, V]`."""
        head = self.embed[...] if self.cfg.tied else self.head[...]
        return linear(hidden, head, out_dtype=jnp.dtype(jnp.float32))

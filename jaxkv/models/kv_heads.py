"""Fewer KV heads than tensor shards: each shard gets a copy of the head that its query heads share.

The copies are made once, when the weights are loaded. The model that runs is a plain one with more KV heads and fewer
query heads on each, so no step repeats K or V; its page pool holds the copies, too.

Axis letters: H query heads, K KV heads of the checkpoint, C copies of each, G = H // K, D head dim.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxkv.errors import ConfigError
from jaxkv.models.config import ModelConfig


def copy_kv_heads(cfg: ModelConfig, tensor: int) -> ModelConfig:
    """The geometry in which `tensor` shards have the same number of KV heads each.

    Raises:
        ConfigError: there is none: query heads that share a KV head would not fit on its shards evenly.
    """
    num_heads, num_kv_heads = cfg.num_heads, cfg.num_kv_heads
    if not _is_even(num_heads, num_kv_heads, tensor):
        possible = [str(n) for n in range(1, num_heads + 1) if _is_even(num_heads, num_kv_heads, n)]
        raise ConfigError(
            f"tensor={tensor} neither divides num_kv_heads={num_kv_heads} nor is a multiple of it that divides "
            f"num_heads={num_heads}; choose one of {', '.join(possible)}"
        )
    copies = max(tensor // num_kv_heads, 1)
    return dataclasses.replace(cfg, num_kv_heads=num_kv_heads * copies, kv_copies=copies)


def _is_even(num_heads: int, num_kv_heads: int, tensor: int) -> bool:
    return num_kv_heads % tensor == 0 or (tensor % num_kv_heads == 0 and num_heads % tensor == 0)


def copy_qkv(stored: jax.Array, copies: int) -> jax.Array:
    """`[K, G + 2, D, ...]` -> `[K * C, G / C + 2, D, ...]`: query heads dealt out in order, K and V copied."""
    k, heads, *inner = stored.shape
    q = stored[:, : heads - 2].reshape(k * copies, -1, *inner)
    return jnp.concatenate([q, jnp.repeat(stored[:, heads - 2 :], copies, axis=0)], axis=1)


def copy_norm(stored: jax.Array, copies: int) -> jax.Array:
    """`[K, D]` -> `[K * C, D]`: of keys, over all heads; copies do not change the mean of the squares."""
    return jnp.repeat(stored, copies, axis=0) if stored.ndim == 2 else stored


def regroup_norm(stored: jax.Array, copies: int) -> jax.Array:
    """`[K, G, D]` -> `[K * C, G / C, D]`: of queries, over all heads."""
    return stored.reshape(stored.shape[0] * copies, -1, stored.shape[2]) if stored.ndim == 3 else stored


# What becomes of the parameters of `decoder.DecoderLayer`, by path.
COPY_HEADS: Mapping[str, Callable[[jax.Array, int], jax.Array]] = {
    "layers/qkv": copy_qkv,
    "layers/qkv_bias": copy_qkv,
    "layers/q_norm": regroup_norm,
    "layers/k_norm": copy_norm,
}

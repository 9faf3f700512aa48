"""What a KV cache buys, shown on one prompt: no cache, a contiguous one, and pages.

    (a) recompute   every step computes the whole sequence again: time grows with the length, no memory
    (b) contiguous  keys and values in one array preallocated to the longest possible length (the model's max_len)
    (c) paged       the engine: pages as the sequence grows

Time per token and KV memory against context length, as data and as a plot.
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv import sharding
from jaxkv.api import LLM
from jaxkv.bench import workloads
from jaxkv.bench.conditions import conditions
from jaxkv.bench.measure import check_fits
from jaxkv.catalog import open_model
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.errors import ConfigError
from jaxkv.kv_math import format_bytes
from jaxkv.models import layers
from jaxkv.models.config import ModelConfig
from jaxkv.request import SamplingParams

_POINTS = 8  # context lengths at which (a) is timed: each is a program of its own
_REPEATS = 3


def bench(args: argparse.Namespace, load: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the three ways and, with `args.out`, draws them.

    Raises:
        ConfigError: a plot is asked for without matplotlib, or the lengths exceed the model's.
    """
    if args.out and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--out draws with matplotlib, which is not installed: pip install 'jaxkv[plot]'")
    workload = workloads.equal("kv-cache", 1, args.prompt_len, args.output_len)
    llm = LLM.load(**{**load, "decode_steps": 1, "overlap": False}, warm_up=True)
    check_fits(workload, llm)
    result = conditions(llm, workload)
    max_len = llm.max_len
    curves = {"paged": _paged(llm, workload.prompts[0], args.output_len)}
    dtype = np.dtype(llm.dtype)
    del llm
    source = open_model(load["model"])
    family, cfg = model_config(source)
    model = load_model(
        source, family, cfg, dtype=dtype, mesh=sharding.make_mesh(1), per_layer=True, quant=load.get("quant")
    )
    curves["contiguous"] = _contiguous(model, cfg, dtype, workload.prompts[0], args.output_len, max_len)
    curves["recompute"] = _recompute(model, workload.prompts[0], args.output_len)
    result |= {"max_len": max_len, "curves": curves}
    if args.out:
        _plot(curves, args.out, f"{result['model']}, {result['dtype']}, {result['device']}")
        result["plot"] = args.out
    return result


def _paged(llm: LLM, prompt: tuple[int, ...], output_len: int) -> list[dict[str, Any]]:
    """One point per decode step of the engine."""
    points: list[dict[str, Any]] = []
    page_bytes = llm.stats().pool_bytes // (llm.num_pages + 1)
    last = time.perf_counter()

    def on_step() -> None:
        nonlocal last
        now, stats = time.perf_counter(), llm.stats()
        if stats.pages_used:
            points.append(_point(stats.tokens_held + 1, now - last, stats.pages_used * page_bytes))
        last = time.perf_counter()

    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    llm.generate([list(prompt)], params, progress=False, on_step=on_step)
    return [point for point in points if point["context_len"] > len(prompt) + 1]


def _contiguous(
    model: nnx.Module, cfg: ModelConfig, dtype: np.dtype, prompt: tuple[int, ...], output_len: int, max_len: int
) -> list[dict[str, Any]]:
    """One token a step over a cache `[L, 2, max_len, K, D]` that is donated from step to step."""
    cache = jnp.zeros((cfg.num_layers, 2, max_len, cfg.num_kv_heads, cfg.head_dim), dtype)
    cache_bytes = cache.nbytes
    step = _jit_with(model, _contiguous_step, donate=True)
    token = np.int32(prompt[0])
    points = []
    for position in range(len(prompt) + output_len - 1):
        start = time.perf_counter()
        sampled, cache = step(token, np.int32(position), cache)
        sampled.block_until_ready()
        if position >= len(prompt):
            points.append(_point(position + 1, time.perf_counter() - start, cache_bytes))
        token = np.int32(prompt[position + 1] if position + 1 < len(prompt) else sampled)  # one kind: one program
    return points


def _contiguous_step(
    model: Any, token: jax.Array, position: jax.Array, cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def attend(layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, **scores: Any):
        new = jnp.stack([k, v])[None]  # [1, 2, 1, K, D]
        cache = jax.lax.dynamic_update_slice(cache, new, (layer, 0, position, 0, 0))
        keys, values = cache[layer]
        return _attention(q, keys, values, position[None], **scores), cache

    hidden, cache = model.hidden(token[None], position[None], cache, attend)
    return jnp.argmax(model.logits(hidden)[0]).astype(jnp.int32), cache


def _recompute(model: nnx.Module, prompt: tuple[int, ...], output_len: int) -> list[dict[str, Any]]:
    """The whole sequence for each token, at a few lengths."""
    tokens = np.resize(np.asarray(prompt, np.int32), len(prompt) + output_len)
    points = []
    for length in np.unique(np.linspace(len(prompt) + 1, len(tokens), _POINTS, dtype=int)).tolist():
        step = _jit_with(model, _recompute_step)
        ids = jnp.asarray(tokens[:length])
        step(ids).block_until_ready()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            step(ids).block_until_ready()
            times.append(time.perf_counter() - start)
        points.append(_point(length, min(times), 0))
    return points


def _recompute_step(model: Any, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)

    def attend(layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, **scores: Any):
        return _attention(q, k, v, positions, **scores), cache

    hidden, _ = model.hidden(tokens, positions, (), attend)
    return jnp.argmax(model.logits(hidden[-1:])[0])


def _attention(
    q: jax.Array,  # [T, H, D]
    keys: jax.Array,  # [S, K, D]
    values: jax.Array,  # [S, K, D]
    positions: jax.Array,  # int32 [T]
    *,
    scale: float,
    window: jax.Array | int | None,
    soft_cap: float | None,
) -> jax.Array:
    """Plain causal attention, [T, H, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("tkgd,skd->kgts", grouped, keys, preferred_element_type=jnp.float32) * scale
    scores = layers.soft_cap(scores, soft_cap)
    distance = positions[:, None] - jnp.arange(keys.shape[0])[None, :]
    visible = (distance >= 0) & (distance < (keys.shape[0] if window is None else window))
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,skd->tkgd", weights.astype(values.dtype), values)
    return out.reshape(num_tokens, num_heads, head_dim)


def _jit_with(model: nnx.Module, function: Any, *, donate: bool = False) -> Any:
    """`function(model, *args)` jitted with the weights as arguments; the last of three args donated."""
    graph, state = nnx.split(model)
    jitted = jax.jit(
        lambda state, *args: function(nnx.merge(graph, state), *args), donate_argnums=(3,) if donate else ()
    )
    return functools.partial(jitted, state)


def _point(context_len: int, seconds: float, kv_bytes: int) -> dict[str, Any]:
    return {"context_len": context_len, "ms_per_token": round(seconds * 1e3, 3), "kv_bytes": kv_bytes}


def _plot(curves: Mapping[str, list[dict[str, Any]]], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for name, points in curves.items():
        lengths = [point["context_len"] for point in points]
        left.plot(lengths, [point["ms_per_token"] for point in points], label=name)
        right.plot(lengths, [point["kv_bytes"] for point in points], label=name)
    left.set(xlabel="context length, tokens", ylabel="ms per token", title="time per token", ylim=(0, None))
    right.set(xlabel="context length, tokens", title="KV memory")
    right.set_yscale("symlog", linthresh=2**20)
    right.yaxis.set_major_formatter(lambda value, _: format_bytes(int(value)) if value >= 1 else "none")
    left.legend()
    right.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

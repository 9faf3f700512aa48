"""Baseline: plain JAX with a contiguous KV cache (`contiguous_model.py`), greedy, one static batch.

    python scripts/baselines/contiguous.py --workload W1 --dtype bf16 --json

Only workloads of equal lengths: a static batch of unequal ones is what `hf.py` shows.
"""

import dataclasses
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contiguous_model as model
import gguf_weights
import jax
import jax.numpy as jnp
import numpy as np
import report


def fastest_layout(shape: gguf_weights.LlamaShape, dtype: str, num_rows: int) -> model.Layout:
    """Measures how many rows a product should have on this machine; what is right for one CPU is 10x off on another.

    With AVX-512 BF16 a single bf16 row is 10x faster when padded to two; without it the padding costs 2x.
    """
    layout = model.LAYOUTS[dtype]
    if num_rows >= layout.min_rows:
        return layout
    dims = (2 * shape.ffn_dim, shape.embed_dim)
    weight = jnp.ones(dims if layout.out_first else dims[::-1], layout.dtype)
    row = jnp.ones((1, shape.embed_dim), layout.dtype)
    times = {}
    for min_rows in (layout.min_rows, 1):
        product = jax.jit(lambda x, w, n=min_rows: model.linear(x, w, out_first=layout.out_first, min_rows=n))
        product(row, weight).block_until_ready()
        trials = []
        for _ in range(20):
            start = time.perf_counter()
            product(row, weight).block_until_ready()
            trials.append(time.perf_counter() - start)
        times[min_rows] = min(trials)
    return dataclasses.replace(layout, min_rows=min(times, key=lambda min_rows: times[min_rows]))


def run_batch(
    params: model.Params,
    shape: gguf_weights.LlamaShape,
    layout: model.Layout,
    prompts: np.ndarray,
    num_new: int,
    *,
    padded_len: int | None = None,
) -> report.Run:
    """Runs prompts [B, T] of one length greedily, prefill in one call and decode in one device loop.

    Args:
        num_new: output tokens a row, at least 2.
        padded_len: prompt tokens to compute with padding on the right, so that lengths share one program; the cache
            then holds `padded_len + num_new` tokens.
    """
    num_rows, prompt_len = prompts.shape
    span = prompt_len if padded_len is None else padded_len
    tokens = jnp.asarray(np.pad(prompts, ((0, 0), (0, span - prompt_len))), dtype=jnp.int32)
    length = jnp.asarray(prompt_len, jnp.int32)
    cache = model.init_cache(shape, layout, num_rows=num_rows, num_tokens=span + num_new)
    jax.block_until_ready((cache, tokens))

    start = time.perf_counter()
    first, cache = model.prefill(params, cache, tokens, length, shape=shape, layout=layout)
    first.block_until_ready()
    middle = time.perf_counter()
    rest, cache = model.decode(params, cache, first, length, shape=shape, layout=layout, num_steps=num_new - 1)
    rest.block_until_ready()
    end = time.perf_counter()

    ids = np.concatenate([np.asarray(first)[None], np.asarray(rest)]).T  # [B, num_new]
    return report.Run(
        prefill_s=middle - start,
        decode_s=end - middle,
        ttft_s=middle - start,
        output_ids=tuple(tuple(map(int, row)) for row in ids),
    )


def main() -> int:
    options = report.parser(__doc__ or "", names=("W1", "W2", "W3"), dtypes=("bf16", "f32"))
    args = options.parse_args()
    start = time.perf_counter()
    shape, weights = gguf_weights.read_llama(args.gguf or gguf_weights.default_path())
    workload = report.workload(args)
    num_rows = 1 if args.check else workload.num_requests
    layout = fastest_layout(shape, args.dtype, num_rows)
    params = model.pack_params(shape, weights, layout)
    report.log(f"loaded in {time.perf_counter() - start:.1f} s, {layout}")

    if args.check:

        def greedy(prompt_ids: list[int], num_new: int) -> tuple[int, ...]:
            prompts = np.asarray([prompt_ids], dtype=np.int32)
            padded_len = -(-len(prompt_ids) // 256) * 256  # few programs for many prompts
            return run_batch(params, shape, layout, prompts, num_new, padded_len=padded_len).output_ids[0]

        return 0 if report.compare_with_references(args.check, greedy) else 1

    prompts = np.asarray(workload.prompts, dtype=np.int32)
    num_new = workload.output_lens[0]
    assert workload.is_uniform
    start = time.perf_counter()
    run_batch(params, shape, layout, prompts, num_new)
    report.log(f"compiled and warmed up in {time.perf_counter() - start:.1f} s")
    conditions = report.conditions("jax-contiguous", workload, args.dtype, ("jax", "jaxlib"))
    runs = []
    for index in range(args.repeats):
        runs.append(run_batch(params, shape, layout, prompts, num_new))
        report.log(f"pass {index}: prefill {runs[-1].prefill_s:.3f} s, decode {runs[-1].decode_s:.3f} s")
    extra = {"threads": conditions["cores"], "min_rows": layout.min_rows, "out_first": layout.out_first}
    report.emit(conditions | extra | report.summary(workload, runs), as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

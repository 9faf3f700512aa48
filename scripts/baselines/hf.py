"""Baseline: Hugging Face transformers `generate` on torch CPU, greedy, static batches padded on the left.

    python scripts/baselines/hf.py --workload W4 --dtype bf16 --batching padded --json

The model is built from its configuration and the same numpy weights; no hub is asked.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import gguf_weights
import numpy as np
import report
import torch
import transformers

from jaxkv.bench import workloads

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
PAD_ID = 0

# How requests are put into static batches: the order, and requests a batch (None: all at once).
BATCHINGS: dict[str, tuple[Callable[[int, int], int], int | None]] = {
    "padded": (lambda prompt_len, output_len: 0, None),
    "sorted-prompt": (lambda prompt_len, output_len: prompt_len, 16),  # what a user can do
    "sorted-output": (lambda prompt_len, output_len: output_len, 16),  # an oracle: output lengths are not known before
}


class Clock(transformers.StoppingCriteria):
    """Notes when each token of a batch is there; never stops."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def build(shape: gguf_weights.LlamaShape, weights: dict[str, np.ndarray], dtype: torch.dtype) -> Any:
    """Builds LlamaForCausalLM from numpy weights, as `from_pretrained(dtype=...)` would."""
    tied = "lm_head.weight" not in weights
    config = transformers.LlamaConfig(
        hidden_size=shape.embed_dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_len,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,  # EOS is ignored: every request makes the tokens it is asked for
        pad_token_id=PAD_ID,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=False
    )
    assert not unexpected and (not missing or (tied and missing == ["lm_head.weight"])), (missing, unexpected)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    return model.eval()


def generate(model: Any, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[torch.Tensor, float, list[float]]:
    """Generates `num_new` tokens for each prompt in one left-padded batch.

    Returns:
        Ids [B, num_new], the time of the start, and of each token.
    """
    longest = max(map(len, prompts))
    tokens = torch.full((len(prompts), longest), PAD_ID, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    clock = Clock()
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=num_new,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    assert len(clock.stamps) == num_new
    return out[:, longest:], start, clock.stamps


def batches(workload: workloads.Workload, batching: str) -> list[list[int]]:
    """Returns the requests' indices, batch by batch."""
    key, batch_size = BATCHINGS[batching]
    order = sorted(
        range(workload.num_requests), key=lambda index: key(workload.prompt_lens[index], workload.output_lens[index])
    )
    size = batch_size or len(order)
    return [order[at : at + size] for at in range(0, len(order), size)]


def run(model: Any, workload: workloads.Workload, batching: str) -> report.Run:
    """Times one pass: batches one after another, each until its longest output is done."""
    output_ids: dict[int, tuple[int, ...]] = {}
    prefill_s = decode_s = ttft_sum_s = 0.0
    begin = time.perf_counter()
    for batch in batches(workload, batching):
        num_new = max(workload.output_lens[index] for index in batch)
        ids, start, stamps = generate(model, [workload.prompts[index] for index in batch], num_new)
        prefill_s += stamps[0] - start
        decode_s += stamps[-1] - stamps[0]
        ttft_sum_s += len(batch) * (stamps[0] - begin)
        for row, index in enumerate(batch):
            output_ids[index] = tuple(ids[row, : workload.output_lens[index]].tolist())
        report.log(
            f"batch of {len(batch)}: prefill {stamps[0] - start:.2f} s, {num_new} tokens in {stamps[-1] - start:.2f} s"
        )
    return report.Run(
        prefill_s=prefill_s,
        decode_s=decode_s,
        ttft_s=ttft_sum_s / workload.num_requests,
        output_ids=tuple(output_ids[index] for index in range(workload.num_requests)),
    )


def warm_up(model: Any, workload: workloads.Workload, batching: str, num_threads: int | None) -> int:
    """Runs a few tokens, and settles the number of threads: all, or one where others use the cores too.

    Threads that wait for each other at every product are 4x slower than one when the machine is busy: the baseline
    shall not look worse than it is.
    """
    prompts = [workload.prompts[index][:8] for index in batches(workload, batching)[0]]
    times = {}
    for candidate in (num_threads,) if num_threads else sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(candidate)
        generate(model, prompts, 1)
        _, start, stamps = generate(model, prompts, 6)
        times[candidate] = stamps[-1] - start
        report.log(f"threads={candidate}: {times[candidate]:.2f} s")
    best = min(times, key=lambda candidate: times[candidate])
    torch.set_num_threads(best)
    return best


def main() -> int:
    options = report.parser(__doc__ or "", names=tuple(workloads.STANDARD), dtypes=tuple(DTYPES))
    options.add_argument("--batching", choices=tuple(BATCHINGS), default="padded")
    options.add_argument("--threads", type=int, help="torch threads; default: one or all, whichever is faster now")
    args = options.parse_args()
    start = time.perf_counter()
    shape, weights = gguf_weights.read_llama(args.gguf or gguf_weights.default_path())
    model = build(shape, weights, DTYPES[args.dtype])
    weights.clear()
    report.log(f"loaded in {time.perf_counter() - start:.1f} s")

    if args.check:

        def greedy(prompt_ids: list[int], num_new: int) -> list[int]:
            return generate(model, [prompt_ids], num_new)[0][0].tolist()

        return 0 if report.compare_with_references(args.check, greedy) else 1

    workload = report.workload(args)
    num_threads = warm_up(model, workload, args.batching, args.threads)
    conditions = report.conditions("hf-generate", workload, args.dtype, ("transformers", "torch"))
    runs = [run(model, workload, args.batching) for _ in range(args.repeats)]
    extra = {
        "threads": num_threads,
        "batching": args.batching,
        "attention": model.config._attn_implementation,
    }
    report.emit(conditions | extra | report.summary(workload, runs), as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

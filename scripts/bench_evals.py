"""lm-evaluation-harness through jaxkv, through jaxkv's HTTP server and through Hugging Face: the same numbers, how fast.

    python scripts/bench_evals.py --http --batch-size 16

Runs SmolLM2 in float32 on tasks made by tests/evals/tasks.py, one model after the other, each after a short pass that warms it
up. Prints one JSON line: accuracies, largest differences of log-likelihoods, differing answers, seconds and their ratio, also
of processor time, which other work on the machine hardly changes.
"""

# The harness' decorators hide what its functions and classes take.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the packages that read them are imported
os.environ["HF_DATASETS_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "baselines"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tasks in tests/evals

import gguf_weights
import lm_eval
import torch
from hf import build
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from jaxkv import LLM
from jaxkv.evals.model import JaxkvLM
from jaxkv.tokenizer import Tokenizer, save_tokenizer
from tests.evals.tasks import write_tasks

MAX_LEN = 512  # tokens; the tasks' documents have some 60


def evaluate(model: LM, folder: Path, names: list[str]) -> tuple[Any, float, float]:
    """Runs the tasks; returns what the harness says, the seconds it took, and those of this process on all processors."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    told = lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    assert told is not None
    return told, time.perf_counter() - start_s, time.process_time() - start_cpu_s


def responses(told: dict[str, Any]) -> dict[tuple[str, int], Any]:
    """What the model said to each document: (log-likelihood, is greedy) of each choice, or a text."""
    return {
        (name, sample["doc_id"]): [resp[0] for resp in sample["resps"]]
        for name, samples in told["samples"].items()
        for sample in samples
    }


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The largest difference of log-likelihoods, and how many flags and texts differ."""
    ours, theirs = responses(one), responses(other)
    assert ours.keys() == theirs.keys()
    pairs = [pair for key in ours for pair in zip(ours[key], theirs[key], strict=True)]
    scores = [(a, b) for a, b in pairs if not isinstance(a, str)]
    return {
        "max_diff": max((abs(float(a[0]) - float(b[0])) for a, b in scores), default=0.0),
        "num_scores": len(scores),
        "num_other_greedy": sum(bool(a[1]) != bool(b[1]) for a, b in scores),
        "num_texts": len(pairs) - len(scores),
        "num_other_texts": sum(a != b for a, b in pairs if isinstance(a, str)),
    }


def accuracies(told: dict[str, Any]) -> dict[str, float]:
    return {
        f"{name} {metric}": value
        for name, metrics in told["results"].items()
        for metric, value in metrics.items()
        if metric.split(",")[0] in ("acc", "acc_norm", "exact_match")
    }


def hugging_face(gguf: Path, tokenizer: Tokenizer, folder: Path, batch_size: int) -> HFLM:
    """The same weights and tokenizer in transformers."""
    shape, weights = gguf_weights.read_llama(gguf)
    model = build(shape, weights, torch.float32)
    folder.mkdir()
    save_tokenizer(tokenizer, folder)
    return HFLM(
        pretrained=model, tokenizer=PreTrainedTokenizerFast.from_pretrained(folder), batch_size=batch_size,
        max_length=MAX_LEN, device="cpu",
    )  # fmt: skip


class Server:
    """`jaxkv serve` in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "jaxkv", "serve", "smollm2", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " at http://" in line, "the server did not start"
        self.url = line.split(" at ")[1].strip()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)


def over_http(tokenizer_folder: Path, folder: Path, names: list[str]) -> tuple[Any, float, float]:
    """The tasks through the harness's own client of OpenAI's completions."""
    sizes = ["--dtype", "float32", "--max-len", str(MAX_LEN), "--max-rows", "16", "--num-pages", "1024"]
    with Server(sizes) as server:
        client = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="smollm2", tokenizer_backend="huggingface",
            tokenizer=str(tokenizer_folder), batch_size=16, num_concurrent=4, max_length=MAX_LEN, seed=0,
        )  # fmt: skip
        return evaluate(client, folder, names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, help="only so many documents with choices")
    parser.add_argument("--exercises", type=int, help="only so many with answers to write")
    parser.add_argument("--batch-size", type=int, default=16, help="of Hugging Face")
    parser.add_argument("--http", action="store_true", help="the HTTP route, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("HF_DATASETS_CACHE", str(Path(name) / "datasets"))
        folder, few = Path(name) / "all", Path(name) / "few"
        folder.mkdir()
        few.mkdir()
        warm = write_tasks(few, num_questions=4, num_exercises=2)
        names = write_tasks(folder, num_questions=args.questions, num_exercises=args.exercises)
        llm = LLM.load("smollm2", dtype="float32", max_len=MAX_LEN, max_rows=16, num_pages=1024, progress=False)
        assert llm.tokenizer is not None
        hf = hugging_face(gguf_weights.default_path(), llm.tokenizer, folder / "tokenizer", args.batch_size)
        told, seconds, cpu_s = {}, {}, {}
        for which, model in (("hf", hf), ("jaxkv", JaxkvLM(llm))):
            evaluate(model, few, warm)
            llm.clear_prefix_cache()
            told[which], seconds[which], cpu_s[which] = evaluate(model, folder, names)
        if args.http:
            told["http"], seconds["http"], _ = over_http(folder / "tokenizer", folder, names)
        result = {
            "bench": "evals", **vars(args), "torch_threads": torch.get_num_threads(),
            "accuracy": {which: accuracies(each) for which, each in told.items()},
            "against_hf": compare(told["jaxkv"], told["hf"]),
            "seconds": {which: round(each, 2) for which, each in seconds.items()},
            "cpu_s": {which: round(each, 2) for which, each in cpu_s.items()},
            "times_as_fast_as_hf": round(seconds["hf"] / seconds["jaxkv"], 2),
            "cpu_times_as_fast": round(cpu_s["hf"] / cpu_s["jaxkv"], 2),
        }  # fmt: skip
        if args.http:
            result["http_against_jaxkv"] = compare(told["http"], told["jaxkv"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()

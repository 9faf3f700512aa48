"""How long a long prefix takes to its first token: computed, and read from disk after a restart.

    python scripts/bench_tiers.py -m smollm2 --prefix-len 10000

Each figure comes from a process of its own, with programs compiled and run before the clock starts (so the disk's page cache is
warm, as after most restarts; --drop-caches forgets what the kernel kept of the files, as after a reboot). Prints one JSON line.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE_SIZE = 16  # tokens
WARM_LEN = 1040  # tokens of the prefix that warms up: 64 pages go down and come up at once, one is computed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--prefix-len", type=int, default=10_000, help="tokens (default: 10000)")
    parser.add_argument("--dtype", default="auto", help="of weights, activations and K/V")
    parser.add_argument("--token-budget", type=int, default=512, help="tokens a step computes")
    parser.add_argument("--repeats", type=int, default=1, help="processes for each figure; the median counts")
    parser.add_argument("--drop-caches", action="store_true", help="read the files from the disk itself")
    parser.add_argument("--cache-dir", help="default: a temporary folder")
    parser.add_argument("--role", choices=["cold", "hit"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        print(json.dumps(measure(args, save=args.role == "cold")))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cache_dir = args.cache_dir or folder
        cold = [_in_process(args, "cold", cache_dir) for _ in range(args.repeats)]
        hits = []
        for _ in range(args.repeats):
            if args.drop_caches:
                _drop(Path(cache_dir))
            hits.append(_in_process(args, "hit", cache_dir))
    cold_s, hit_s = (statistics.median(run["ttft_s"] for run in runs) for runs in (cold, hits))
    result = {
        "bench": "tiers", "model": args.model, "dtype": cold[0]["dtype"], "prefix_len": args.prefix_len,
        "token_budget": args.token_budget, "repeats": args.repeats, "files_read": "disk" if args.drop_caches else "page cache",
        "cold_ttft_s": cold_s, "disk_hit_ttft_s": hit_s, "times_faster": cold_s / hit_s,
        "cached_tokens": hits[0]["cached_tokens"], "disk_hit_pages": hits[0]["disk_hit_pages"],
        "saved_bytes": cold[0]["saved_bytes"], "save_s": cold[0]["save_s"],
        "read_s": hits[0]["read_s"], "hash_s": hits[0]["hash_s"],
        "compiled_late": [run["compiled_late"] for run in (*cold, *hits)],
        "same_tokens": len({tuple(run["token_ids"]) for run in (*cold, *hits)}) == 1,
        "platform": cold[0]["platform"], "cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if result["same_tokens"] and result["cached_tokens"] > 0 else 1


def measure(args: argparse.Namespace, *, save: bool) -> dict[str, Any]:
    """One process: the prefix's first tokens, and what they cost."""
    import jax
    import numpy as np

    from jaxkv import LLM, SamplingParams

    rng = np.random.default_rng(0)
    num_pages = (args.prefix_len + WARM_LEN + 512) // PAGE_SIZE + 8
    llm = LLM.load(
        args.model, dtype=args.dtype, max_len=args.prefix_len + 512, max_rows=1, page_size=PAGE_SIZE,
        num_pages=num_pages, token_budget=args.token_budget, cache_dir=args.cache_dir,
    )  # fmt: skip
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prefix = rng.integers(100, 20_000, args.prefix_len).tolist()
    # Compiles and runs what is about to be used, and no more: a whole warm-up takes minutes on a CPU. Another prefix
    # goes to disk and comes up again as the one to be measured will.
    warm = np.random.default_rng(os.getpid()).integers(100, 20_000, WARM_LEN).tolist()
    llm.save_prefix(warm)
    llm.clear_prefix_cache()
    llm.generate([warm], params)
    before = llm.stats()
    assert before.num_disk_hit_pages > 0
    llm.clear_prefix_cache()
    num_compiles = llm.stats().num_compiles
    start = time.perf_counter()
    (out,) = llm.generate([prefix], params)
    total_s = time.perf_counter() - start
    assert out.metrics is not None and out.metrics.ttft_s is not None
    stats = llm.stats()
    found: dict[str, Any] = {
        "ttft_s": out.metrics.ttft_s, "total_s": total_s, "cached_tokens": out.cached_tokens,
        "disk_hit_pages": stats.num_disk_hit_pages - before.num_disk_hit_pages,
        "compiled_late": stats.num_compiles - num_compiles, "token_ids": out.outputs[0].token_ids,
        "dtype": llm.kv_dtype, "platform": jax.default_backend(),
    }  # fmt: skip
    if save:
        start = time.perf_counter()
        found |= {"saved_bytes": llm.save_prefix(prefix).num_bytes, "save_s": time.perf_counter() - start}
    else:
        found |= _file_times(Path(args.cache_dir), out.cached_tokens // PAGE_SIZE)
    return found


def _file_times(folder: Path, num_files: int) -> dict[str, float]:
    """What reading and hashing as many files takes alone, in one thread, from the kernel's page cache."""
    paths = itertools.islice(folder.rglob("*.kv"), num_files)
    read_s = hash_s = 0.0
    for path in paths:
        start = time.perf_counter()
        data = path.read_bytes()
        read = time.perf_counter()
        hashlib.sha256(data).digest()
        read_s, hash_s = read_s + read - start, hash_s + time.perf_counter() - read
    return {"read_s": read_s, "hash_s": hash_s}


def _in_process(args: argparse.Namespace, role: str, cache_dir: str) -> dict[str, Any]:
    command = [
        sys.executable, __file__, "--role", role, "-m", args.model, "--prefix-len", str(args.prefix_len), "--dtype", args.dtype,
        "--token-budget", str(args.token_budget), "--cache-dir", cache_dir,
    ]  # fmt: skip
    if role == "cold":  # whatever earlier ones saved must not be found
        for path in Path(cache_dir).rglob("*.kv"):
            path.unlink()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _drop(folder: Path) -> None:
    """The kernel forgets what it kept of the files."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())

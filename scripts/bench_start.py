"""Seconds from starting a process to the first token, with an empty and with a warm compilation cache.

    python scripts/bench_start.py -m smollm2

Prints one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import sys
from jaxkv import LLM, SamplingParams
llm = LLM.load(sys.argv[1], max_len=1024, max_rows=8, num_pages=256, progress=False)
next(llm.stream("Once upon a time", SamplingParams(max_tokens=8, temperature=0)))
"""


def start(model: str, cache: str) -> float:
    """Seconds of one process."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", PROGRAM, model], env=os.environ | {"JAXKV_CACHE_DIR": cache}, check=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold_s, warm_s = start(args.model, cache), start(args.model, cache)
    result = {"bench": "start", "model": args.model, "cold_s": round(cold_s, 2), "warm_s": round(warm_s, 2)}
    print(json.dumps(result | {"cold_over_warm": round(cold_s / warm_s, 2)}))


if __name__ == "__main__":
    main()

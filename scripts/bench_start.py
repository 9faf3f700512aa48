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
import sys, time
from jaxkv import LLM, SamplingParams
llm = LLM.load(sys.argv[1], max_len=1024, max_rows=8, num_pages=256, progress=False, warm_up=sys.argv[2] == "True")
next(llm.stream("Once upon a time", SamplingParams(max_tokens=8, temperature=0)))
print(time.time())
"""


def start(model: str, cache: str, warm_up: bool) -> float:
    """Seconds from starting a process to its first token."""
    begin = time.time()  # this clock both processes share
    command = [sys.executable, "-c", PROGRAM, model, str(warm_up)]
    env = os.environ | {"JAXKV_CACHE_DIR": cache}
    return float(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout) - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--warm-up", action="store_true", help="compile every program first, as a server does")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold_s, warm_s = (start(args.model, cache, args.warm_up) for _ in range(2))
    result = {
        "bench": "start",
        "model": args.model,
        "warm_up": args.warm_up,
        "cold_s": round(cold_s, 2),
        "warm_s": round(warm_s, 2),
    }
    print(json.dumps(result | {"cold_over_warm": round(cold_s / warm_s, 2)}))


if __name__ == "__main__":
    main()

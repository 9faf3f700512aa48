"""Compiles the step programs for chips that are not here, and prints what came out as a table or as JSON.

    python scripts/compile_report.py                    # all cases, Markdown
    python scripts/compile_report.py --only v6e --json  # those whose name holds a word

Takes some minutes on two cores. Needs `pip install 'jaxkv[plan]'`.
"""

import argparse
import json
import sys
import time

from jaxkv.capacity.proof import CASES, Proof, prove
from jaxkv.capacity.report import to_json
from jaxkv.capacity.topology import prepare_environment
from jaxkv.kv_math import format_bytes

HEAD = ("chips", "model", "data x tensor", "attention", "weights", "pages", "fits", "in place", "collectives a layer",
        "temporaries", "bytes / least", "compile s")  # fmt: skip


def row(proof: Proof) -> tuple[str, ...]:
    """One line of the table."""
    case, found = proof.case, [complaint for step in proof.complaints for complaint in step]
    collectives = {kind: n for step in proof.steps for kind, n in step.collectives.items()}
    return (
        case.topology,
        case.model,
        f"{case.data} x {case.tensor}",
        proof.steps[0].attention,
        format_bytes(proof.weight_bytes),
        f"{proof.num_pages:,}",
        _yes(not any("it needs" in complaint for complaint in found)),
        _yes(all(step.pool_is_aliased for step in proof.steps) and not any("as large as" in c for c in found)),
        ", ".join(f"{n} {kind}" for kind, n in collectives.items()) or "none",
        format_bytes(max(step.temp_bytes for step in proof.steps)),
        f"{proof.ratio:.2f}",
        f"{max(step.compile_s for step in proof.steps):.1f}",
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def markdown(rows: list[tuple[str, ...]]) -> str:
    """A table."""
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the compilers make of the step programs, chips x models.")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds WORD")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    prepare_environment()
    proofs = []
    for case in CASES:
        if args.only in str(case):
            start = time.perf_counter()
            proofs.append(prove(case))
            print(f"{case}: {time.perf_counter() - start:.0f} s {proofs[-1].complaints}", file=sys.stderr)
    if args.json:
        print(json.dumps([to_json(proof) for proof in proofs], indent=1))
    else:
        print(markdown([row(proof) for proof in proofs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

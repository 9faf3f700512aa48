"""How much of JSON Schema the automata cover: right, wrongly accepted, wrongly rejected and refused pairs.

    python scripts/schema_coverage.py FOLDER [--additional closed] [--host] [--worst 10] [--only TEXT]

Args:
    FOLDER: files of the JSON-Schema-Test-Suite (lists of {"schema", "tests": [{"data", "valid"}]}) and of JSONSchemaBench
        ({"split", "schema", "tests"}), at any depth. A table has a row for each file of the first kind
        and each split of the second.
    --host: schemas that have no automaton are given to llguidance (strict), and its answers are counted in columns of their own;
        what it refuses as well is compiled with `shallow=True`.

An instance is its compact JSON text, in its own order of properties.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import signal
import time

import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.schema import compile_schema

TIMEOUT_S = 20  # of processor time, as all times here


@dataclasses.dataclass
class Row:
    """Counts of a table row, in pairs of schema and instance."""

    pairs: int = 0
    right: int = 0
    unsound: int = 0
    tight: int = 0
    refused: int = 0
    host_right: int = 0
    host_wrong: int = 0
    schemas: int = 0
    built: int = 0
    hosted: int = 0

    def __iadd__(self, other: "Row") -> "Row":
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


@dataclasses.dataclass
class Case:
    """One schema with its instances."""

    row: str
    name: str
    schema: object
    tests: list


def cases(folder: pathlib.Path):
    """All schemas below a folder."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, list):
            for index, case in enumerate(content):
                yield Case(
                    f"suite/{path.stem}", f"{path.stem}[{index}] {case['description']}", case["schema"], case["tests"]
                )
        else:
            yield Case(
                f"bench/{content['split']}", f"{content['split']}/{content['id']}", content["schema"], content["tests"]
            )


def text_of(data: object) -> bytes:
    """The compact JSON text of an instance."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


class Host:
    """llguidance on single bytes."""

    def __init__(self) -> None:
        import llguidance

        self.llguidance = llguidance

        class Tokens:
            eos_token_id = 256
            bos_token_id = None
            tokens = (*(bytes([byte]) for byte in range(256)), b"\xff[eos]")
            special_token_ids = (256,)

            def __call__(self, text):
                return list(text.encode() if isinstance(text, str) else text)

        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()))

    def grammar(self, schema: object) -> str | None:
        """The compiled grammar; None if llguidance refuses it."""
        made = self.llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        return None if self.llguidance.LLMatcher(self.tokenizer, made, log_level=0).is_error() else made

    def accepts(self, grammar: str, text: bytes) -> bool:
        """Whether a text is a whole output of the grammar."""
        matcher = self.llguidance.LLMatcher(self.tokenizer, grammar, log_level=0)
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def measure(case: Case, options: dict, host: Host | None):
    """The counts of one case, seconds to compile, the automaton's states, and what went wrong."""
    row = Row(pairs=len(case.tests), schemas=1)
    begin = time.process_time()
    wrong: list[str] = []
    compiled, reason = _compile(case, options)
    if compiled is None and host is not None and not _ask_host(case, row, host):
        compiled, reason = _compile(case, options | {"shallow": True})
    seconds = time.process_time() - begin
    if compiled is None:
        row.refused = 0 if row.hosted else len(case.tests)
        return row, seconds, None, reason, wrong
    row.built = 1
    for test in case.tests:
        accepted = compiled.automaton.matches(text_of(test["data"]))
        if accepted == test["valid"]:
            row.right += 1
        elif accepted:
            row.unsound += 1
            wrong.append(f"ACCEPTED {case.name}: {json.dumps(test['data'])[:200]}")
        else:
            row.tight += 1
            wrong.append(f"rejected {case.name}: {json.dumps(test['data'])[:200]}")
    return row, seconds, compiled, None, wrong


def _compile(case: Case, options: dict):
    """The compiled schema, or None and why not."""
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
    try:
        return compile_schema(case.schema, **options), None
    except (RequestError, TimeoutError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _ask_host(case: Case, row: Row, host: Host) -> bool:
    """Counts the host matcher's answers; False if it refuses the schema."""
    grammar = host.grammar(case.schema)
    if grammar is None:
        return False
    row.hosted = 1
    for test in case.tests:
        if host.accepts(grammar, text_of(test["data"])) == test["valid"]:
            row.host_right += 1
        else:
            row.host_wrong += 1
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--additional", choices=["schema", "closed"], default="schema")
    parser.add_argument("--whitespace", choices=["compact", "flexible"], default="compact")
    parser.add_argument("--host", action="store_true", help="give what has no automaton to llguidance")
    parser.add_argument("--only", default="", help="only rows or names that contain this")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the slowest schemas")
    parser.add_argument("--wrong", action="store_true", help="print all wrong pairs and all refusals")
    asked = parser.parse_args()

    def late(*_):
        raise TimeoutError(f"more than {TIMEOUT_S} s of processor time")

    signal.signal(signal.SIGPROF, late)
    host = Host() if asked.host else None
    options = dict(additional=asked.additional, whitespace=asked.whitespace)
    rows: dict[str, Row] = collections.defaultdict(Row)
    taken: list[tuple[float, str, str]] = []
    sizes: dict[str, list[int]] = collections.defaultdict(list)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for case in cases(asked.folder):
        if asked.only not in case.row and asked.only not in case.name:
            continue
        row, seconds, compiled, reason, wrong = measure(case, options, host)
        rows[case.row] += row
        kind = case.row.partition("/")[0]
        times[kind].append(seconds)
        if compiled is not None:
            sizes[kind].append(compiled.automaton.num_states)
        what = reason if compiled is None else f"{compiled.automaton.num_states} states, {compiled.level}"
        taken.append((seconds, case.name, what or ""))
        if asked.wrong:
            for line in wrong:
                print(line)
            if reason:
                print("refused ", case.name, reason[:200], f"{seconds:.2f} s")
    _print_table(rows)
    for kind in times:
        _print_spread(f"{kind}: processor seconds", np.array(times[kind]))
        _print_spread(f"{kind}: states", np.array(sizes[kind]))
    for seconds, name, what in sorted(taken, reverse=True)[: asked.worst]:
        print(f"{seconds:7.2f} s  {name}: {what[:160]}")


def _print_table(rows: dict[str, Row]) -> None:
    print(
        "| file | pairs | right | accepted wrongly | rejected wrongly | refused "
        "| host right | host wrong | schemas | built | hosted |"
    )
    print("|---|" + "---|" * 10)
    totals: dict[str, Row] = collections.defaultdict(Row)
    for name, row in rows.items():
        totals[name.partition("/")[0]] += row
    for name, row in [*rows.items(), *((f"**{kind}**", row) for kind, row in totals.items())]:
        share = f"{row.right} ({100 * row.right / max(row.pairs, 1):.1f} %)"
        counts = [row.pairs, share, row.unsound, row.tight, row.refused, row.host_right, row.host_wrong]
        print("|", " | ".join(map(str, [name, *counts, row.schemas, row.built, row.hosted])), "|")


def _print_spread(title: str, values: np.ndarray) -> None:
    if len(values):
        points = np.percentile(values, [50, 75, 90, 95, 99, 100])
        print(
            title,
            " ".join(
                f"{name}={point:.4g}"
                for name, point in zip(("p50", "p75", "p90", "p95", "p99", "max"), points, strict=True)
            ),
        )


if __name__ == "__main__":
    main()

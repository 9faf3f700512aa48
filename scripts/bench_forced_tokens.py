"""How many tokens of compact tool calls are known without a decode step, and what finding them adds to a table's build.

    python scripts/bench_forced_tokens.py

SmolLM2's tokenizer, the calls of `tests/host/grammar/test_forced.py`; llguidance's `compute_ff_tokens` in the same run. Every
forced token must be the one that the tokenizer has there. Prints one JSON line; times are CPU time.
"""

import json
import pathlib
import sys
import time

import llguidance

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jaxkv.catalog import ALIASES
from jaxkv.grammar.compiled import OnDevice
from jaxkv.grammar.regex import compile_regex
from jaxkv.grammar.tables import build_tables
from jaxkv.grammar.vocabulary import vocabulary_of
from jaxkv.tokenizer import load_tokenizer
from tests.host.grammar.test_forced import CALL, CALLS, num_forced, num_forced_by_llguidance


def main() -> None:
    tokenizer = load_tokenizer(ALIASES["smollm2"].locate())
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    automaton = compile_regex(CALL)
    build_tables(automaton, vocabulary)  # the vocabulary's own tables are made once
    report: dict[str, object] = {"bench": "forced_tokens", "vocab": vocabulary.size}
    grammar = None
    for name, canonical in (("plain", False), ("canonical", True)):
        start = time.process_time()
        grammar = OnDevice(name, build_tables(automaton, vocabulary, canonical=canonical))
        report[f"{name}_build_ms"] = round((time.process_time() - start) * 1e3, 1)
    theirs = llguidance.LLTokenizer(
        tokenizer.vocabulary.backend.to_str(),  # pyright: ignore[reportAttributeAccessIssue]
        n_vocab=tokenizer.vocab_size,
        eos_token=min(tokenizer.eos_ids),
    )
    calls = [tokenizer.encode(text, add_bos=False) for text in CALLS]
    assert grammar is not None
    report["tokens"] = total = sum(map(len, calls))
    report["forced"] = ours = sum(num_forced(grammar, ids) for ids in calls)
    report["share"] = round(ours / total, 3)
    by_llguidance = sum(num_forced_by_llguidance(llguidance, theirs, ids) for ids in calls)
    report["llguidance_share"] = round(by_llguidance / total, 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

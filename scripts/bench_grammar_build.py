"""How long grammars take to compile, and how large their tables are: JSON Schemas for one vocabulary.

    python scripts/bench_grammar_build.py FOLDER [--vocab 128256 | smollm2 | FILE.tiktoken] [--limit N]

FOLDER holds files `{"id": ..., "schema": ...}`, in subfolders too. `--vocab N` makes a vocabulary of N words up; the files
of `tiktoken` carry those of Llama 3 and Qwen. Prints one JSON line: quantiles (50, 75, 90, 99, 100 %) of CPU and wall time in
ms, of bytes and counts; how many schemas were refused, and why; llguidance's compile times in the same run if installed.
"""

import argparse
import base64
import collections
import json
import pathlib
import sys
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jaxkv.errors import RequestError
from jaxkv.grammar.schema import compile_schema
from jaxkv.grammar.tables import build_tables
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary, vocabulary_of

QUANTILES = (0.5, 0.75, 0.9, 0.99, 1)


def load_vocabulary(name: str) -> TokenVocabulary:
    if name.isdecimal():
        return made_up(int(name))
    if name.endswith((".tiktoken", ".model")):
        pairs = (line.split() for line in pathlib.Path(name).read_bytes().splitlines() if line)
        ranks = {int(rank): base64.b64decode(token) for token, rank in pairs}
        tokens = [ranks.get(i, b"") for i in range(max(ranks) + 1)]
        return make_vocabulary(tokens, size=len(tokens) + 256, end_ids=[len(tokens) + 1])
    from jaxkv.catalog import ALIASES
    from jaxkv.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ALIASES[name].locate())
    return vocabulary_of(tokenizer, tokenizer.vocab_size)


def made_up(size: int) -> TokenVocabulary:
    """Single bytes; numbers to 999; punctuation as JSON has it; words of syllables, half of them after a space."""
    random = np.random.default_rng(0)
    syllables = [c + v + e for c in "bcdfghjklmnprstvwz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    tokens = {bytes([byte]): None for byte in range(256)}
    tokens |= {str(i).encode(): None for i in range(1000)}
    marks = [
        '"',
        '":',
        '":"',
        '","',
        '{"',
        '"}',
        '"}}',
        "},",
        "[{",
        '["',
        "\\n",
        '\\"',
        "  ",
        "    ",
        "\n\n",
        ', "',
        '": "',
    ]
    tokens |= {mark.encode(): None for mark in marks}
    while len(tokens) < size - 1:
        parts, lengths = random.integers(0, len(syllables), (size, 4)), random.integers(1, 5, size)
        titles, spaces, ends = random.random(size) < 0.2, random.random(size) < 0.5, random.random(size) < 0.01
        for row, length, title, space, end in zip(
            *map(np.ndarray.tolist, (parts, lengths, titles, spaces, ends)), strict=True
        ):
            word = "".join(syllables[i] for i in row[:length])
            tokens[(" " * space + (word.title() if title else word) + '"' * end).encode()] = None
    return make_vocabulary(list(tokens)[: size - 1], size=size, end_ids=[size - 1])


def measure(schema: Any, vocabulary: TokenVocabulary) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    automaton = compile_schema(schema).automaton
    middle = time.process_time()
    tables = build_tables(automaton, vocabulary)
    end = time.process_time()
    return {
        "automaton_cpu_ms": (middle - cpu) * 1e3,
        "tables_cpu_ms": (end - middle) * 1e3,
        "total_cpu_ms": (end - cpu) * 1e3,
        "total_wall_ms": (time.perf_counter() - wall) * 1e3,
        "states": tables.num_states,
        "classes": tables.next.shape[1],
        "masks": len(tables.masks),
        "megabytes": tables.nbytes / 1e6,
    }


def llguidance_ms(schemas: list[Any], vocabulary: TokenVocabulary) -> list[float]:
    """Wall times of a new matcher with its first mask: what a request would wait for."""
    try:
        import llguidance
    except ImportError:
        return []
    from jaxkv.grammar.host import HostGrammars

    tokenizer = HostGrammars(vocabulary).tokenizer
    times: list[float] = []
    for schema in schemas:
        start = time.perf_counter()
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema))
        if not matcher.is_error():
            matcher.compute_bitmask()
            times.append((time.perf_counter() - start) * 1e3)
    return times


def quantiles(values: list[float]) -> list[float]:
    return [round(float(q), 2) for q in np.quantile(values, QUANTILES)] if values else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--vocab", default="128256")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    vocabulary = load_vocabulary(args.vocab)
    found = [json.loads(path.read_text()) for path in sorted(args.folder.rglob("*.json"))]
    schemas = [entry["schema"] for entry in found if isinstance(entry, dict) and "schema" in entry][: args.limit]
    measure({"type": "object", "properties": {"a": {"type": "string"}}}, vocabulary)  # the trie, the common templates
    results: list[dict[str, float]] = []
    refused: collections.Counter[str] = collections.Counter()
    for schema in schemas:
        try:
            results.append(measure(schema, vocabulary))
        except RequestError as error:
            refused[type(error).__name__] += 1
    report = {"vocab": args.vocab, "size": vocabulary.size, "schemas": len(schemas), "built": len(results)}
    report |= {"refused": dict(refused), "quantiles": QUANTILES}
    report |= {name: quantiles([result[name] for result in results]) for name in (results[0] if results else ())}
    report["llguidance_wall_ms"] = quantiles(llguidance_ms(schemas, vocabulary))
    print(json.dumps(report))


if __name__ == "__main__":
    main()

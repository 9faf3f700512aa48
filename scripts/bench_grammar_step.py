"""What grammars cost a decode step on this machine: rows under grammars on the device, free rows, rows matched on the host.

    python scripts/bench_grammar_step.py [--rows 32] [--vocab 128256] [--layers 30] [--rounds 10]

A model of SmolLM2-135M's geometry with random weights and a made-up vocabulary of `--vocab` tokens. Free and constrained
steps take turns, so that other processes on the machine disturb both alike. Prints one JSON line: medians, best times, and
`ratio`, the median over all pairs of steps; and microseconds for the masks of all rows matched on the host, of llguidance's own
parallel call, and of XGrammar's where it is installed (`pip install --no-deps xgrammar apache-tvm-ffi`).
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jaxkv import ops, sharding
from jaxkv.device.batch import Buckets
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.device.runner import Runner
from jaxkv.device.settings import grammar_sizes
from jaxkv.grammar.compiled import OnDevice
from jaxkv.grammar.compiler import GrammarCompiler
from jaxkv.grammar.host import GuidanceMatcher, HostGrammars
from jaxkv.grammar.host_masks import HostMasks
from jaxkv.grammar.room import GrammarRoom
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary
from jaxkv.grammar_layout import GrammarPlace
from jaxkv.models.registry import find_family
from jaxkv.plan import Chunk, PageWrite, RowSetup, StepPlan
from jaxkv.request import SamplingParams
from jaxkv.structured import Choice, Form, Grammar, JsonSchema, Regex

PAGE, MAX_LEN = 16, 512
FORMS: list[Form] = [
    JsonSchema(
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
    ),
    Regex("[a-z ]{400,500}"),
    JsonSchema({"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 100}),
    Regex("([a-f]+-[0-9]+,)*end"),
]
HOST_FORMS: dict[str, Form] = {
    "list": Grammar('start: value\nvalue: "[" value ("," value)* "]" | /[a-z0-9]+/'),
    "schema": JsonSchema(
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "minLength": 1, "maxLength": 40},
                        "when": {"type": "string", "format": "date-time"},
                        "weight": {"type": "number"},
                        "tags": {"type": "array", "items": {"type": "string"}},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["name", "children"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        }
    ),
}
MASK_ROUNDS = 500


def vocabulary(size: int) -> TokenVocabulary:
    """Single bytes, and words of two to eight letters and digits with or without a space before."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b'abcdefghijklmnopqrstuvwxyz0123456789{}[]",:-', np.uint8)
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < size - 1:
        tokens.append(random.choice(letters, random.integers(2, 9)).tobytes())
    return make_vocabulary([*tokens, b""], size=size, end_ids=(size - 1,))


def make_runner(vocab: int, layers: int, rows: int) -> Runner:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": layers, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": vocab,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True,
        "hidden_act": "silu",
    }  # fmt: skip
    family = find_family(config)
    cfg = family.config_from_hf(config)
    model = family.build(cfg, jnp.dtype(jnp.float32), per_layer=ops.CPU.per_layer)
    random = np.random.default_rng(0)
    graph, state = nnx.split(model)
    fill = lambda leaf: jnp.asarray(random.standard_normal(leaf.shape, np.float32) * 0.02)  # noqa: E731
    model = nnx.merge(graph, jax.tree.map(fill, state))
    pages = -(-MAX_LEN // PAGE) * rows + 1
    spec = PoolSpec(
        num_layers=layers, num_pages=pages, num_kv_heads=cfg.num_kv_heads, page_size=PAGE, head_dim=cfg.head_dim,
        dtype=jnp.dtype(jnp.float32), storage_dtype=jnp.dtype(jnp.float32), storage_shape=ops.CPU.storage_shape,
    )  # fmt: skip
    buckets = Buckets(
        decode_rows=(rows,), mixed_rows=(0,), mixed_tiles=(rows,), setups=(rows,), page_writes=(pages,), page_copies=(1,),
        count_tokens=(MAX_LEN,),
    )  # fmt: skip
    return Runner(
        model, spec, sharding.make_mesh(), dataclasses.replace(ops.CPU, query_tile=8), buckets, max_rows=rows,
        max_len=MAX_LEN, max_steps=1, vocab_size=vocab, grammars=grammar_sizes(None, vocab),
    )  # fmt: skip


class Bench:
    """Rows that decode for ever under one kind of constraint."""

    def __init__(self, runner: Runner, rows: int, grammars: list[OnDevice] | None) -> None:
        self.runner, self.rows, self.step_id = runner, rows, 0
        runner.reset()
        room = GrammarRoom(grammar_sizes(None, runner._vocab_size), rows)
        places: list[tuple[GrammarPlace | None, int]] = [(None, 0)] * rows
        if grammars:
            chosen = [grammars[row % len(grammars)] for row in range(rows)]
            assert all(room.pin(grammar) for grammar in chosen)
            places = [(room.place_of(grammar), grammar.tables.start) for grammar in chosen]
        prompt = np.arange(1, 9, dtype=np.int32)
        setups = tuple(
            RowSetup(
                row=row, params=SamplingParams(max_tokens=500, temperature=0), seed=0, child=0, prompt_len=8,
                max_total_len=MAX_LEN, stop_ids=(), bad_words_ids=(), token_ids=prompt, grammar=place, grammar_state=state,
            )
            for row, (place, state) in enumerate(places)
        )  # fmt: skip
        per_row = -(-MAX_LEN // PAGE)
        writes = tuple(PageWrite(row, i, 1 + row * per_row + i) for row in range(rows) for i in range(per_row))
        chunks = tuple(Chunk(row, 0, prompt, True) for row in range(rows))
        self._run(setups=setups, page_writes=writes, chunks=chunks, grammar_loads=room.take_loads())

    def step(self) -> float:
        """Seconds of one decode step of all rows."""
        start = time.perf_counter()
        counts = self._run(decode_rows=np.arange(self.rows, dtype=np.int32)).decode_counts
        seconds = time.perf_counter() - start
        assert counts.all(), "rows must not end"
        return seconds

    def _run(self, **plan):
        self.step_id += 1
        return self.runner.dispatch(StepPlan(step_id=self.step_id, **plan)).result()


def host_masks(words: TokenVocabulary, rows: int, form: Form, stop_ids: tuple[int, ...]) -> dict[str, float]:
    """Microseconds for the masks of all rows under a form matched on the host, and of llguidance's own parallel call.

    The two take turns over the same parsers, `MASK_ROUNDS` times; the ratio is the median over pairs. `stop_ids` are
    the model's own, or a request's.
    """
    import llguidance
    import llguidance.numpy

    grammars = HostGrammars(words, words.end_ids)
    make, random = grammars.matcher(form), np.random.default_rng(0)
    matchers, paths = [make() for _ in range(rows)], []
    for row, matcher in enumerate(matchers):
        paths.append(_some_way_in(matcher, words, row, random))
    xgrammar = xgrammar_matchers(words, form, paths)
    parsers = [(matcher.parser, row) for row, matcher in enumerate(matchers)]
    executor, masks = llguidance.LLExecutor(), HostMasks()
    ours, theirs, others, out = [], [], [], np.zeros((rows, -(-words.size // 32)), np.int32)
    for _ in range(MASK_ROUNDS):
        start = time.perf_counter()
        masks.fill([(matcher, stop_ids) for matcher in matchers])
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        llguidance.numpy.fill_next_token_bitmask_par(executor, parsers, out)
        theirs.append(time.perf_counter() - start)
    if xgrammar is not None:  # in rounds of its own: whoever comes after it pays for it
        for _ in range(MASK_ROUNDS // 10):
            start = time.perf_counter()
            xgrammar(out)
            others.append(time.perf_counter() - start)
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    found = {"us": statistics.median(ours) * 1e6, "llguidance_us": statistics.median(theirs) * 1e6, "ratio": ratio}
    return found | ({"xgrammar_us": statistics.median(others) * 1e6} if others else {})


def xgrammar_matchers(
    words: TokenVocabulary, form: Form, paths: list[list[int]]
) -> Callable[[np.ndarray], None] | None:
    """XGrammar's own parallel call for rows that took the same tokens; None without XGrammar, or for other than schemas."""
    if importlib.util.find_spec("xgrammar") is None or not isinstance(form, JsonSchema):
        return None
    xgrammar: Any = importlib.import_module("xgrammar")
    tokens = [words.token_bytes(token_id) for token_id in range(words.size)]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=words.size, stop_token_ids=[*words.end_ids]
    )
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(
        json.dumps(form.schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
    )
    matchers = [xgrammar.GrammarMatcher(compiled) for _ in paths]
    for matcher, path in zip(matchers, paths, strict=True):
        for token_id in path:  # up to where XGrammar takes another language than llguidance
            if not matcher.accept_token(token_id):
                break
    batch = xgrammar.BatchGrammarMatcher()
    return lambda out: batch.batch_fill_next_token_bitmask(matchers, out)


def _some_way_in(
    matcher: GuidanceMatcher, words: TokenVocabulary, steps: int, random: np.random.Generator
) -> list[int]:
    """Up to `steps` random tokens, which the matcher has taken."""
    mask, path = np.zeros(matcher.num_words, np.uint32), []
    for _ in range(steps):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = np.setdiff1d(allowed, matcher.end_ids)
        if not len(allowed):
            break
        path.append(int(random.choice(allowed)))
        matcher.consume(path[-1])
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 32), ("vocab", 128_256), ("layers", 30), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    words = vocabulary(args.vocab)
    compiler = GrammarCompiler(lambda _: words, lambda _: True)
    start = time.perf_counter()
    grammars = [compiler.submit(form).result() for form in FORMS]
    report = {"bench": "grammar_step", **vars(args), "build_s": time.perf_counter() - start}
    report["num_choice_tokens"] = compiler.submit(Choice(["yes", "no"])).result().min_tokens
    benches = {
        name: Bench(make_runner(args.vocab, args.layers, args.rows), args.rows, chosen)
        for name, chosen in (("free", None), ("grammar", grammars))
    }
    times: dict[str, list[float]] = {name: [] for name in benches}
    for turn in range(args.rounds + 1):
        for name, bench in benches.items():
            seconds = bench.step()
            if turn:  # the first one compiles
                times[name].append(seconds)
    for name, seconds in times.items():
        report[f"{name}_step_ms"] = round(statistics.median(seconds) * 1e3, 2)
        report[f"{name}_best_ms"] = round(min(seconds) * 1e3, 2)
    pairs = zip(times["grammar"], times["free"], strict=True)
    report["ratio"] = round(statistics.median(constrained / free for constrained, free in pairs), 3)
    report["best_ratio"] = round(report["grammar_best_ms"] / report["free_best_ms"], 3)
    for name, form in HOST_FORMS.items():
        for whose, stop_ids in (("", words.end_ids), ("_other_stops", (1, *words.end_ids))):
            measured = host_masks(words, args.rows, form, stop_ids)
            report |= {f"host_masks_{name}{whose}_{key}": round(value, 2) for key, value in measured.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()

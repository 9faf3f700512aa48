"""Do structured outputs always fit their schemas? Random schemas, hot sampling, everything that could disturb them at once.

    python scripts/structured_proof.py --num 500 [--vocab smollm2 | 49152 | 128256 | 151936 | 262144] [--sequences 10000]

`--num` requests with random JSON Schemas (those of `tests/host/grammar/test_schema_random.py`), temperature 1.5, in batches
of 32 rows with free ones between them, submitted with shuffled ids, overlap on, and a pool so small that rows are preempted.
A third have only as many tokens as their schema needs at least, or few more. The model is SmolLM2, or one with random weights
over a made-up vocabulary of that many tokens. Every finished output must parse and be valid for jsonschema; on the device every
output must be finished.

`--sequences` outputs of random tokens are drawn on the host besides, each within a random budget: all must be whole.
Prints one JSON line; the exit status is 1 if something was wrong.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import jsonschema
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jaxkv import LLM, SamplingParams, ops, sharding
from jaxkv.device.runner import Runner
from jaxkv.device.settings import EngineConfig, resolve
from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import OnDevice
from jaxkv.grammar.compiler import GrammarCompiler
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.grammar.room import GrammarRoom
from jaxkv.grammar.vocabulary import vocabulary_of
from jaxkv.intake import Intake
from jaxkv.outputs import OutputBuilder
from jaxkv.request import FinishReason, RequestOutput
from jaxkv.schedule.scheduler import Scheduler
from jaxkv.structured import JsonSchema
from jaxkv.tokenizer.base import SpecialTokens, Tokenizer
from scripts.bench_grammar_build import made_up
from tests import tiny
from tests.host.grammar.test_schema_random import SCHEMAS

ROWS, PAGE, MAX_LEN, NUM_PAGES = 32, 8, 160, 120  # a full row takes 20 pages: there is room for six of the 32
FREE_EVERY = 5  # requests, one of which is free


class Words:
    """The vocabulary of a tokenizer that spells text by the longest word that fits."""

    added_ids = frozenset[int]()
    utf8_errors = "replace"
    trims_all_spaces = False

    def __init__(self, size: int) -> None:
        self.size, words = size, made_up(size)
        self._tokens = [words.token_bytes(i) for i in range(size)]
        self._ids = {token: i for i, token in enumerate(self._tokens) if token}
        self._longest = max(map(len, self._tokens))
        self.special_ids = frozenset({size - 1})

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            length = next(n for n in range(min(len(data), self._longest), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    first_token_bytes = token_bytes

    def save(self, folder: Any) -> dict[str, Any]:
        raise RequestError(f"{folder}: a made-up vocabulary is not saved")


def random_llm(vocab_size: int) -> LLM:
    """A model of two tiny layers with random weights over a made-up vocabulary."""
    end = vocab_size - 1
    tokenizer = Tokenizer(Words(vocab_size), SpecialTokens(texts={}, eos_ids=frozenset({end})))
    config = EngineConfig(
        max_len=MAX_LEN, max_rows=ROWS, page_size=PAGE, num_pages=NUM_PAGES, token_budget=128, decode_steps=4
    )
    geometry = tiny.config(vocab_size=vocab_size)
    mesh = sharding.make_mesh(1, 1)
    backend = ops.select("cpu", "cpu")
    resolved = resolve(config, geometry, jnp.dtype(jnp.float32), mesh, backend)
    # One shape a program: compiling many takes longer than all the steps of a proof.
    buckets = resolved.buckets
    largest = {each.name: getattr(buckets, each.name)[-1:] for each in dataclasses.fields(buckets)}
    resolved = dataclasses.replace(resolved, buckets=dataclasses.replace(buckets, **largest))
    module = tiny.model(geometry, per_layer=resolved.backend.per_layer)
    runner = Runner.build(module, resolved, mesh, vocab_size=vocab_size)
    fits = GrammarRoom(resolved.scheduler.grammars, ROWS).fits
    compiler = GrammarCompiler(lambda _: vocabulary_of(tokenizer, vocab_size), fits)
    engine = Engine(Scheduler(resolved.scheduler), runner, tokenizer, overlap=True, grammars=compiler)
    return LLM("random", engine, Intake(vocab_size=vocab_size, eos_ids=(end,), tokenizer=tokenizer), config)


def smollm2() -> LLM:
    return LLM.load(
        "smollm2", max_len=MAX_LEN, max_rows=ROWS, page_size=PAGE, num_pages=NUM_PAGES, token_budget=256, decode_steps=4,
        progress=False,
    )  # fmt: skip


def random_schemas(num: int, seed: int) -> list[Any]:
    """Distinct schemas, the trivial ones (`true`, `{"type": "null"}`) left out where there are others."""
    found: dict[str, Any] = {}

    @settings(max_examples=12 * num, database=None, deadline=None, phases=[Phase.generate], derandomize=True,
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(SCHEMAS)
    def collect(schema: Any) -> None:
        if isinstance(schema, dict) and len(json.dumps(schema)) > 24:
            found.setdefault(json.dumps(schema), schema)

    collect()
    schemas = list(found.values())
    return [schemas[i] for i in np.random.default_rng(seed).permutation(len(schemas))[:num]]


@dataclasses.dataclass
class Tally:
    """What came of the requests."""

    seen: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def check(self, output: RequestOutput, params: SamplingParams, *, on_device: bool) -> None:
        """Counts an output, and notes what is wrong with it."""
        (completion,) = output.outputs
        form, reason = params.structured, completion.finish_reason
        self.seen["tokens"] += len(completion.token_ids)
        if not isinstance(form, JsonSchema):
            self.seen["free"] += 1
            if reason not in (FinishReason.STOP, FinishReason.LENGTH):
                self.wrong.append(f"a free row ended with {reason}: {completion.error}")
            return
        self.seen["device" if on_device else "host"] += 1
        told = f"{form.schema} max_tokens={params.max_tokens}: {reason} {completion.error or completion.text!r}"
        if reason is FinishReason.STOP:
            self.seen["finished"] += 1
            try:
                value = json.loads(completion.text)
                jsonschema.Draft202012Validator(form.schema).validate(value)
            except (ValueError, jsonschema.ValidationError) as error:
                self.wrong.append(f"{told}: {error}")
        elif on_device or reason is not FinishReason.LENGTH:
            self.wrong.append(told)


def prove(llm: LLM, num: int, seed: int) -> tuple[Tally, dict[str, Any]]:
    """Runs `num` structured requests and some free ones."""
    random, tally = np.random.default_rng(seed), Tally()
    asks: list[SamplingParams] = []
    for schema in _endless(random_schemas(num, seed)):
        if len(asks) >= num:
            break
        try:
            form = JsonSchema(schema)
            future = llm._engine.compile(SamplingParams(structured=form))
            assert future is not None
            least = future.result().min_tokens
        except RequestError:
            tally.seen["refused schemas"] += 1
            continue
        room = int(random.integers(0, 6)) if random.random() < 1 / 3 else int(random.integers(20, 90))
        asks.append(
            SamplingParams(
                max_tokens=min(max(least, 1) + room, 110),
                temperature=1.5,
                seed=int(random.integers(1 << 30)),
                structured=form,
            )
        )
    asks += [SamplingParams(max_tokens=60, temperature=1.0, seed=i) for i in range(num // (FREE_EVERY - 1))]
    order, start, pending = random.permutation(len(asks)), time.perf_counter(), collections.deque[tuple]()
    names = random.permutation(len(asks))
    for name, index in zip(names.tolist(), order.tolist(), strict=True):
        prompt = random.integers(300, 40_000, int(random.integers(3, 40))).tolist()
        request = llm.prepare(prompt, asks[index])
        pending.append((dataclasses.replace(request, request_id=f"r{name}"), asks[index]))
    running: list[tuple[OutputBuilder, SamplingParams]] = []
    while pending or running:
        while pending and len(running) < 2 * ROWS:  # some always wait
            request, params = pending.popleft()
            running.append((llm.enqueue(request), params))
        llm.step()
        for builder, params in running:
            if builder.output is not None:
                tally.check(builder.output, params, on_device=isinstance(builder.grammar, OnDevice))
        running = [each for each in running if each[0].output is None]
    while llm.is_busy:
        llm.step()
    llm._engine.scheduler.check()
    stats = llm.stats()
    facts = {
        "seconds": round(time.perf_counter() - start, 1), "preemptions": stats.num_preemptions, "steps": stats.num_steps,
        "pages_used": stats.pages_used,
    }  # fmt: skip
    return tally, facts


def _endless(schemas: list[Any]) -> Iterator[Any]:
    while schemas:
        yield from schemas


def whole_in_any_budget(llm: LLM, num: int, seed: int) -> dict[str, int]:
    """Random tokens under the masks of grammar and budget: every output must be whole when its tokens are used up."""
    random, grammars = np.random.default_rng(seed), []
    for schema in random_schemas(min(num, 200), seed + 1):
        try:
            future = llm._engine.compile(SamplingParams(structured=JsonSchema(schema)))
            assert future is not None
            grammar = future.result()
        except RequestError:
            continue
        if isinstance(grammar, OnDevice):
            grammars.append(grammar)
    cut = tokens = 0
    for number in range(num):
        matcher = TokenMatcher(grammars[number % len(grammars)].tables)
        left = matcher.dist + int(random.integers(0, 12))
        while left:
            allowed = np.flatnonzero(matcher.mask(left))
            if not len(allowed) or (matcher.is_accepting and random.random() < 0.1):
                break
            assert matcher.advance(int(allowed[random.integers(len(allowed))]))
            left -= 1
            tokens += 1
        cut += not matcher.is_accepting
    return {"sequences": num, "sequence_tokens": tokens, "cut_off": cut}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--vocab", default="49152")
    parser.add_argument("--sequences", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llm = smollm2() if args.vocab == "smollm2" else random_llm(int(args.vocab))
    report: dict[str, Any] = {"proof": "structured", **vars(args)}
    wrong: list[str] = []
    if args.num:
        tally, facts = prove(llm, args.num, args.seed)
        report |= {**tally.seen, **facts, "wrong": len(tally.wrong)}
        wrong += tally.wrong
    if args.sequences:
        report |= whole_in_any_budget(llm, args.sequences, args.seed)
        wrong += [f"{report['cut_off']} sequences were cut off"] * bool(report["cut_off"])
    print(json.dumps(report))
    for each in wrong[:20]:
        print(each, file=sys.stderr)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

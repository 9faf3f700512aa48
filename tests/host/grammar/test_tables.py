"""The fast table builder against the plain one, on automata and vocabularies drawn at random."""

import dataclasses
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxkv.errors import RequestError
from jaxkv.grammar import loops
from jaxkv.grammar.automaton import ENTER, NO_TICK, TICK, ByteAutomaton, Counters
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.grammar.regex import compile_regex
from jaxkv.grammar.schema import compile_schema
from jaxkv.grammar.tables import TokenTables, build_tables
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary, vocabulary_of
from jaxkv.tokenizer.load import load_tokenizer
from tests.tokenizer import tiny

from .plain_tables import PlainTables, step_token

ALPHABET = b'ab",\\x'


def make_automaton(
    rows: list[dict[int, int]], accepting: set[int], start: int = 1, counters: Counters | None = None
) -> ByteAutomaton:
    """Automaton with a class for each byte of ALPHABET (by index) and one for all others, trimmed."""
    table = np.zeros((len(rows), len(ALPHABET) + 1), np.int32)
    for state, row in enumerate(rows):
        for symbol, target in row.items():
            table[state, symbol] = target
    byte_class = np.full(256, len(ALPHABET), np.uint8)
    byte_class[list(ALPHABET)] = np.arange(len(ALPHABET))
    accepts = np.zeros(len(rows), bool)
    accepts[list(accepting)] = True
    alive = accepts.copy()
    for _ in rows:
        alive |= alive[table].any(axis=1)
    alive[0] = False
    table[~alive] = 0
    table[~alive[table]] = 0
    return ByteAutomaton(byte_class, table, accepts & alive, start if alive[start] else 0, counters)


@st.composite
def automata(draw: st.DrawFn) -> ByteAutomaton:
    size = draw(st.integers(2, 9))
    rows = [{}] + [
        draw(st.dictionaries(st.integers(0, len(ALPHABET)), st.integers(1, size - 1), max_size=7))
        for _ in range(size - 1)
    ]
    return make_automaton(rows, draw(st.sets(st.integers(1, size - 1), min_size=1)))


@st.composite
def counted_automata(draw: st.DrawFn) -> ByteAutomaton:
    """Some counted strings in a row or a circle, with characters of one and of two bytes, and escapes."""
    num = draw(st.integers(1, 3))
    limits = [(0, 0)]
    for _ in range(num):
        least = draw(st.integers(0, 6))
        limits.append((least, draw(st.one_of(st.integers(max(1, least), least + 8), st.just(1 << 30)))))
    rows: list[dict[int, int]] = [{}, {2: 4}, {3: 0}, {}]
    a, b, quote, comma, escape, x = range(6)
    region, ticks = [0, 0, 0, 0], [{}, {quote: ENTER}, {}, {}]
    for i in range(num):  # states 4 + 3 i: inside, after an escape, after the string
        inside, escaped, after = 4 + 3 * i, 5 + 3 * i, 6 + 3 * i
        rows += [{a: inside, b: inside, quote: after, escape: escaped}, {a: inside, quote: inside}, {}]
        if draw(st.booleans()):
            rows[-3][x] = inside
        if draw(st.booleans()):
            rows[-3][6] = inside  # all other bytes: a wide loop
        following = 4 + 3 * draw(st.integers(0, num - 1))
        rows[-1] = {quote: following}
        if draw(st.booleans()):
            rows[-1][comma] = 1
        region += [i + 1, i + 1, 0]
        ticks += [{a: TICK, b: TICK, escape: TICK, x: TICK, 6: TICK}, {}, {quote: ENTER}]
    size = len(rows)
    counters = Counters(
        region=np.array(region, np.int16),
        limits=np.array(limits, np.int32),
        tick=np.zeros((size, len(ALPHABET) + 1), np.int8),
    )
    for state, row in enumerate(ticks):
        for symbol, effect in row.items():
            counters.tick[state, symbol] = effect if symbol in rows[state] else NO_TICK
    return make_automaton(rows, {4 + 3 * i + 2 for i in range(num)}, counters=counters)


@st.composite
def vocabularies(draw: st.DrawFn) -> TokenVocabulary:
    """A few ids without bytes, some twice, mostly all single bytes of the alphabet."""
    pieces = st.lists(st.sampled_from(list(ALPHABET + b"\xc3y")), min_size=1, max_size=6).map(bytes)
    tokens = draw(st.lists(pieces, max_size=25))
    if draw(st.integers(0, 3)):
        tokens += [bytes([byte]) for byte in ALPHABET + b"y"]
    tokens = draw(st.permutations([*tokens, b"", b"<end>", *tokens[:2]]))
    end = tokens.index(b"<end>")
    return make_vocabulary(tokens, size=len(tokens) + draw(st.integers(0, 40)), end_ids=[end])


def assert_same(plain: PlainTables, tables: TokenTables) -> None:
    """Every place that tokens reach: same masks, same places after each token, same distances."""
    counters, vocabulary = plain.automaton.counters, plain.vocabulary
    places = {plain.start: TokenMatcher(tables)}
    todo = [plain.start]
    while todo:
        place = todo.pop()
        matcher = places[place]
        assert tables.byte_state[matcher.state] == place[0]
        if counters is not None and counters.region[place[0]]:
            assert matcher.counter == place[1]
        expected = plain.mask(place)
        np.testing.assert_array_equal(matcher.mask(), expected)
        assert matcher.dist == plain.dist[place]
        assert matcher.is_accepting == (plain.dist[place] == 0)
        for remaining in (matcher.dist, matcher.dist + 1):
            in_time = expected.copy()
            for token, after in plain.after[place].items():
                in_time[token] = plain.dist[after] <= remaining - 1
            np.testing.assert_array_equal(matcher.mask(remaining), in_time)
        for token, after in plain.after[place].items():
            following = TokenMatcher(tables)
            following.state, following.counter = matcher.state, matcher.counter
            assert following.advance(token)
            if after not in places:
                places[after] = following
                todo.append(after)
            else:
                assert following.state == places[after].state
    assert len(places) == len(plain.dist.keys() & reached(plain))
    assert tables.num_states == 1 + len({state for state, _ in places})
    bits = np.unpackbits(tables.masks.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, vocabulary.size :].any()


def reached(plain: PlainTables) -> set[tuple[int, int]]:
    seen, todo = {plain.start}, [plain.start]
    while todo:
        for after in plain.after[todo.pop()].values():
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def check(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> None:
    plain = PlainTables(automaton, vocabulary)
    built = build(automaton, vocabulary)
    if isinstance(built, TokenTables):
        assert plain.start in plain.dist
        assert_same(plain, built)
    elif isinstance(built, TooLarge):  # tokens without all single bytes, and lengths that cannot be completed with them
        assert "counted string" in str(built) and any(bytes([byte]) not in vocabulary.strings for byte in ALPHABET)
    else:
        assert "no text" in str(built) and plain.start not in plain.dist


def build(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> TokenTables | RequestError:
    try:
        return build_tables(automaton, vocabulary)
    except RequestError as error:
        return error


@pytest.fixture(params=[1, 16], ids=["loops everywhere", "wide loops only"])
def min_width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MIN_WIDTH", request.param)


@pytest.mark.usefixtures("min_width")
@hypothesis.given(automata(), vocabularies())
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None, max_examples=20
)
def test_equals_plain_builder(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> None:
    check(automaton, vocabulary)


@pytest.mark.usefixtures("min_width")
@hypothesis.given(counted_automata(), vocabularies())
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None, max_examples=20
)
def test_equals_plain_builder_with_counters(automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> None:
    counters = automaton.counters
    finite = dataclasses.replace(counters, limits=np.minimum(counters.limits, 40))
    check(dataclasses.replace(automaton, counters=finite), vocabulary)


STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
OBJECT = r'\{"name":' + STRING + r',"unit":"(celsius|fahrenheit)"(,"days":(0|[1-9][0-9]*))?\}'


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "sentencepiece", "unigram", "gguf_llama"])
def test_tokens_accept_what_the_bytes_accept(kind: str) -> None:
    """However a text is cut into tokens; and ends are allowed only where it is complete."""
    tokenizer = tiny.load(kind)
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size + 37)
    automaton = compile_regex(OBJECT)
    tables = build_tables(automaton, vocabulary)
    rng = np.random.default_rng(0)
    of_bytes = {vocabulary.token_bytes(i): i for i in range(vocabulary.size) if vocabulary.token_bytes(i)}
    single = all(bytes([byte]) in of_bytes for byte in range(256))
    for text in ('{"name":"the dog","unit":"celsius"}', '{"name":"é\\n","unit":"fahrenheit","days":120}', '{"name":1}'):
        for _ in range(20):
            data, matcher, position = text.encode(), TokenMatcher(tables), 0
            alive = True
            while alive and position < len(data):
                sizes = [n for n in range(1, 12) if data[position : position + n] in of_bytes]
                if not sizes:
                    assert not single
                    break
                size = rng.choice(sizes)
                token = of_bytes[data[position : position + size]]
                position += size
                assert matcher.mask()[list(tables.end_ids)].all() == matcher.is_accepting
                alive = matcher.advance(token)
                assert alive == (automaton.run(data[:position])[0] != 0)
            if alive and position == len(data):
                assert matcher.is_accepting == automaton.matches(data)


def test_every_walk_within_a_budget_ends_whole() -> None:
    tokenizer = tiny.load("byte_level")
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    automaton = compile_regex(OBJECT)
    tables = build_tables(automaton, vocabulary)
    rng = np.random.default_rng(1)
    for extra in range(40):
        matcher, data = TokenMatcher(tables), b""
        for remaining in range(tables.min_tokens + extra, 0, -1):
            token = int(rng.choice(np.flatnonzero(matcher.mask(remaining))))
            if token in tables.end_ids:
                break
            assert matcher.advance(token)
            data += vocabulary.token_bytes(token)
        assert matcher.is_accepting and automaton.matches(data)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_vocabulary_has_the_bytes_of_every_back_end(kind: str) -> None:
    """The bytes of an encoded text's tokens are the text; special tokens and ids without tokens have none."""
    tokenizer = tiny.load(kind)
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size + 5)
    assert vocabulary_of(tokenizer, tokenizer.vocab_size + 5) is vocabulary
    assert (vocabulary.rank_of[tokenizer.vocab_size :] == -1).all()
    barred = [*tokenizer.special_ids, *tokenizer.eos_ids]
    assert barred and (vocabulary.rank_of[barred] == -1).all()
    assert list(vocabulary.strings) == sorted(set(vocabulary.strings)) and b"" not in vocabulary.strings
    text = "the lazy dog sleeps"
    assert vocabulary.encode is not None
    ids = vocabulary.encode(text)
    data = b"".join(vocabulary.token_bytes(i) for i in ids)
    # A vocabulary that trims all spaces has no way to write text without one: nothing is forced with it.
    assert data == (b" " if kind == "unigram" else b"") + text.encode()


def test_equals_plain_rows_on_a_real_vocabulary(smollm2_gguf_path: Path) -> None:
    """At places along a text with a counted string: open, near its limits, inside a character, and after it."""
    tokenizer = load_tokenizer(smollm2_gguf_path)
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 40}, "note": {"type": "string"}},
        "required": ["name", "note"],
        "additionalProperties": False,
    }
    automaton = compile_schema(schema).automaton
    assert automaton.counters is not None
    tables = build_tables(automaton, vocabulary)
    for text in (
        '{"name":"',
        '{"name":"a',
        '{"name":"' + 33 * "b",
        '{"name":"' + 40 * "c",
        '{"name":"the dog","note":"é',
    ):
        matcher, place = TokenMatcher(tables), (automaton.start, 0)
        for token in tokenizer.encode(text, add_bos=False):
            assert matcher.advance(token)
            place = step_token(automaton, place, vocabulary.token_bytes(token))
            assert place is not None
        after = [step_token(automaton, place, vocabulary.token_bytes(i)) for i in range(vocabulary.size)]
        expected = [bool(vocabulary.token_bytes(i)) and after[i] is not None for i in range(vocabulary.size)]
        np.testing.assert_array_equal(matcher.mask(), expected)

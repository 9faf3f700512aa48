"""Matchers on the host: the same language as the device's tables, masks with the right stop ids, JSON that is watched."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import Matcher, OnDevice, OnHost
from jaxkv.grammar.compiler import GrammarCompiler
from jaxkv.grammar.host import HostGrammars
from jaxkv.grammar.host_masks import HostMasks, HostRow
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary
from jaxkv.structured import Choice, Form, Grammar, JsonSchema, Regex, ToolCalls

TOKENS = [bytes([i]) for i in range(128)] + [b"ab", b'{"', b'":', b"bc,", b"", b"\xc3", b"\xa9"]
END, SILENT = len(TOKENS), len(TOKENS) + 1
V = len(TOKENS) + 3
VOCABULARY = make_vocabulary([*TOKENS, b"<end>", b"<silent>"], size=V, excluded=[SILENT], end_ids=[END])
HOST = HostGrammars(VOCABULARY)
COMPILER = GrammarCompiler(lambda _: VOCABULARY, lambda _: True)
FORMS: list[Form] = [
    Regex("(ab|b)*c?[0-9]{2,4}"),
    Choice(["ab", "abc", 'a"b', "é"]),
    JsonSchema(
        {
            "type": "object",
            "properties": {"ab": {"enum": [1, 20, "ab", "é"]}},
            "required": ["ab"],
            "additionalProperties": False,
        }
    ),
]


def bits(mask: np.ndarray) -> np.ndarray:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:V].astype(bool)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_host_and_the_device_speak_the_same_language(form: Form, data: st.DataObject) -> None:
    """Along random walks every mask is the same, and so is where the text may end.

    But where the text is forced: there llguidance admits the one token that the tokenizer would choose.
    """
    grammar = COMPILER.submit(form).result()
    assert isinstance(grammar, OnDevice)
    ours, theirs = TokenMatcher(grammar.tables), HOST.matcher(form)()
    for _ in range(12):
        mask = bits(HostMasks().fill([(theirs, (END,))])[0])
        want = ours.mask()
        want[END] = ours.is_accepting
        assert (mask == want).all() or (mask.sum() == 1 and (want & mask).sum() == 1), np.flatnonzero(mask != want)
        tokens = np.flatnonzero(mask[:END])
        if not len(tokens):
            break
        token = int(data.draw(st.sampled_from(tokens.tolist())))
        assert ours.advance(token)
        theirs.consume(token)


def test_masks_have_each_request_s_own_stop_ids() -> None:
    """Also where llguidance has another idea of the end, and where two rows differ."""
    make = HOST.matcher(Grammar('start: "a" start "b" | "c"'))
    begun, whole, other = make(), make(), make()
    for token in b"acb":
        whole.consume(token)
        other.consume(token)
    masks = [bits(mask) for mask in HostMasks().fill([(begun, (END,)), (whole, (END, 5)), (other, (7,))])]
    assert np.flatnonzero(masks[0]).tolist() == [97, 99]
    assert np.flatnonzero(masks[1]).tolist() == [5, END]
    assert np.flatnonzero(masks[2]).tolist() == [7]


def test_masks_are_the_same_whoever_had_the_rows_before() -> None:
    """One object fills them for rows that come, go, advance and change places; a new one is right as it stands here."""
    random = np.random.default_rng(0)
    nested = COMPILER.submit(Grammar('start: "a" start "b" | "c"')).result()
    watched = COMPILER.watch_json().result()
    assert isinstance(nested, OnHost) and isinstance(watched, OnHost)
    outputs = [b"", b"a", b"aa", b"aac", b"aacb", b"aacbb", b"c"]

    def draw() -> HostRow:
        if random.random() < 0.2:
            return watched.start(random.choice([b"x", b"[1]"])), (END,)
        if random.random() < 0.3:
            return nested.start(random.choice(outputs)), (END,)
        stops = random.choice([END, SILENT, 5, 6, 97, V - 1], random.integers(0, 4), replace=False)
        return nested.start(random.choice(outputs)), tuple(sorted(stops.tolist()))

    masks = HostMasks()
    rows = [draw() for _ in range(3)]
    for _ in range(60):
        match random.integers(4):
            case 0:
                rows = [row for row in rows if random.random() < 0.7]
            case 1:
                rows += [draw() for _ in range(random.integers(3))]
            case 2:
                random.shuffle(rows)
            case _:
                for matcher, _ in rows:
                    if not matcher.is_accepting:
                        matcher.consume(99 if slow_mask(matcher, ())[99] else 98)
        rows = rows or [draw()]
        assert [bits(mask).tolist() for mask in masks.fill(rows)] == [slow_mask(*row).tolist() for row in rows]


def slow_mask(matcher: Matcher, stop_ids: tuple[int, ...]) -> np.ndarray:
    mask = np.empty(matcher.num_words, np.uint32)
    matcher.fill(mask)
    allowed = bits(mask).copy()
    allowed[list(matcher.end_ids)] = False
    allowed[list(stop_ids)] = matcher.is_accepting
    return allowed


def test_a_refused_grammar_says_what_is_wrong() -> None:
    for form, message in [(Grammar("start: other"), "other"), (Grammar("root ::= (", "gbnf"), "grammar: ")]:
        with pytest.raises(RequestError, match=message):
            COMPILER.submit(form).result()


def test_equal_forms_are_compiled_once_and_failures_are_tried_again() -> None:
    first = COMPILER.submit(Regex("q+"))
    assert COMPILER.submit(Regex("q+")) is first
    assert COMPILER.submit(Regex("q+"), (113,)) is not first
    failed = COMPILER.submit(Regex("q("))
    assert failed.exception() is not None
    assert COMPILER.submit(Regex("q(")) is not failed


def test_many_threads_share_a_compiler() -> None:
    """The server prepares requests in several: each grammar and each vocabulary is made once, and nobody waits."""
    made: list[bool] = []

    def make(for_tools: bool) -> TokenVocabulary:
        made.append(for_tools)
        time.sleep(0.05)  # so that all threads are here before the first is done
        return VOCABULARY

    compiler = GrammarCompiler(make, lambda _: True)
    forms: list[Form] = [Regex(f"[ab]{{{i}}}c+") for i in range(1, 5)]
    forms += [Grammar('start: "a" start "b" | "c"'), ToolCalls([{"name": "f"}], "required", format="smollm2")]
    barrier, found, waits = threading.Barrier(8), [], []

    def ask() -> None:
        barrier.wait()
        start = time.perf_counter()
        futures = [compiler.submit(form) for form in forms] + [compiler.watch_json()]
        waits.append(time.perf_counter() - start)
        found.append([future.result() for future in futures])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(one is other for each in found for one, other in zip(each, found[0], strict=True))
    assert sorted(made) == [False, True] and max(waits) < 0.05, (made, waits)


def test_old_tables_go_when_there_are_too_many(monkeypatch) -> None:
    compiler = GrammarCompiler(lambda _: VOCABULARY, lambda _: True)
    first = compiler.submit(Regex("a{3}"))
    grammar = first.result()
    assert isinstance(grammar, OnDevice)
    monkeypatch.setattr("jaxkv.grammar.compiler.CACHE_BYTES", 3 * grammar.tables.nbytes)
    for number in range(4, 9):
        compiler.submit(Regex(f"a{{{number}}}")).result()
    assert compiler.submit(Regex("a{8}")).done() and compiler.submit(Regex("a{3}")) is not first


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("nothing", False), ('{"a": 1', False), ('x {"a": [1, {"b": null}]} y', True), ("[1, 2", False), ("[[]", True),
        ("{ no [1]", True), ('["}', False), ('["}"]', True), ("[tru]", False), ("[NaN]", False), ("42", False),
    ],
)  # fmt: skip
def test_json_is_watched_for(text: str, complete: bool) -> None:
    grammar = COMPILER.watch_json().result()
    assert isinstance(grammar, OnHost)
    assert grammar.start(text.encode()).is_accepting == complete
    tokens = [TOKENS.index(b"ab"), *text.encode()]  # whatever the tokens are
    mask = bits(HostMasks().fill([(grammar.start(tokens), (END,))])[0])
    assert mask[END] == complete and mask[:END].all()


def test_what_never_fits_the_device_is_matched_on_the_host() -> None:
    compiler = GrammarCompiler(lambda _: VOCABULARY, lambda _: False)
    grammar = compiler.submit(Regex("(ab)+c")).result()
    assert isinstance(grammar, OnHost)
    assert grammar.accepts(b"ababc") and not grammar.accepts(b"aba")
    with pytest.raises(RequestError, match="only grammars that fit the device can be combined with them"):
        compiler.submit(Regex("(ab)+c"), (97, 98, 99)).result()


def test_what_neither_takes_whole_is_served_with_less() -> None:
    """Items of unlimited variety that must differ: at most one; no repeated one can be written."""
    tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    grammar = COMPILER.submit(JsonSchema(tags)).result()
    assert isinstance(grammar, OnDevice)
    texts = (b"[]", b"[12]", b"[1,1]", b"[1,2]")
    assert [grammar.accepts(text) for text in texts] == [True, True, False, False]
    with pytest.raises(RequestError, match=r"uniqueItems.*cannot be enforced"):
        COMPILER.submit(JsonSchema(tags | {"minItems": 2})).result()

"""Structured outputs through the whole engine: each fits its grammar, is what the slow oracle makes of it, and leaves
its batch mates alone (behaviours 11, 20, 21, 29)."""

import concurrent.futures
import dataclasses
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxkv.device.runner import Runner
from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import OnDevice, OnHost
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.request import FinishReason, RequestOutput
from jaxkv.structured import Choice, Form, Grammar, JsonSchema, Regex, Tag, Triggered
from tests.device.dense import Dense
from tests.device.engine_stage import EOS, Ask, Client, ask, check_tokens, make_tokenizer, only
from tests.device.sampling import Row, adjusted, pack
from tests.device.stage import BUCKETS, MAX_ROWS, V, make_runner

RNG = np.random.default_rng(11)
TEXT = tuple(RNG.integers(3, V, 200).tolist())

OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 2, "maxLength": 9},
        "b": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
        "c": {"enum": ["ab", "ba"]},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}
# 8 grammars, three of them for the host.
FORMS: list[Form] = [
    Regex("[a-f]{3,9}-[0-9]{2}"),
    Choice(["abab", "ab", "fade", "decade"]),
    JsonSchema(OBJECT),
    Regex("(ab|ba)+c"),
    Triggered([Tag("{", Regex("[0-9]+"), "}")], required=True),
    Grammar('start: "a" start "b" | "c"'),
    Grammar('root ::= "(" root ")" root | ""', "gbnf"),
    Grammar('start: item ("," item)*\nitem: /[a-c]{1,3}/ | "[" start "]"'),
]


def fits(form: Form, text: str) -> bool:
    """Whether a text is of the form, without our own automata."""
    match form:
        case Regex():
            return re.fullmatch(form.pattern, text) is not None
        case Choice():
            return text in form.texts
        case JsonSchema():
            jsonschema.validate(json.loads(text), form.schema)
            return True
        case Triggered():
            return re.fullmatch(r"[^{]*(\{[0-9]+\}[^{]*)+", text, re.DOTALL) is not None
        case Grammar(syntax="gbnf"):
            return _balanced(text)
    assert isinstance(form, Grammar)
    if form.text.startswith('start: "a"'):
        return (found := re.fullmatch("(a*)c(b*)", text)) is not None and len(found[1]) == len(found[2])
    return re.fullmatch(r"[\[\]abc,]+", text) is not None and text.count("[") == text.count("]")


def _balanced(text: str) -> bool:
    while "()" in text:
        text = text.replace("()", "")
    return not text


def requests(**changes: Any) -> list[Ask]:
    """All forms, twice, in an order that mixes them with free rows."""
    asks: list[Ask] = []
    for number in range(2):
        for index, form in enumerate(FORMS):
            fields = dict(max_tokens=30, temperature=1.5, seed=100 * number + index, structured=form)
            asks.append(ask(TEXT[index * 5 : index * 9 + 3 + number], **(fields | changes)))
        asks += [ask(TEXT[number : 20 + number], max_tokens=25, ignore_eos=True, seed=1, temperature=1.0)]
        asks += [ask(TEXT[50 : 60 + number], max_tokens=30, repetition_penalty=1.3)]
    order = np.random.default_rng(0).permutation(len(asks))
    return [asks[i] for i in order]


def oracle(dense: Dense, what: Ask, grammar: OnDevice) -> tuple[int, ...]:
    """One row, step by step: masks from the tables on the host, tokens by the sampler alone."""
    matcher, output = TokenMatcher(grammar.tables), ()
    while len(output) < what.params.max_tokens:
        row = Row(**{**vars(what.row()), "output": output})
        allowed = matcher.mask(what.params.max_tokens - len(output))
        allowed[list(what.stop_ids)] = matcher.is_accepting
        logits = np.where(allowed, dense.logits(row.prompt + output)[-1], -np.inf).astype(np.float32)
        if what.params.temperature == 0:
            token = int(adjusted(logits, row).argmax())
        else:
            token = int(dense._sample(logits[None], **pack([row], V))[0])
        output = (*output, token)
        if token in what.stop_ids:
            break
        assert matcher.advance(token)
    return output


def check(outputs: list[RequestOutput], asks: list[Ask], dense: Dense, client: Client) -> None:
    for output, what in zip(outputs, asks, strict=True):
        form, completion = what.params.structured, only(output)
        if form is None:
            check_tokens(output, what, dense)
            continue
        assert completion.error is None
        grammar = client.engine.compile(what.params).result()
        if isinstance(grammar, OnDevice):
            assert completion.token_ids == oracle(dense, what, grammar), (form, completion.text)
            assert fits(form, completion.text), (form, completion.text)  # the budget keeps it whole
            is_free = isinstance(form, Triggered)  # that its text is whole only the model can say
            assert is_free or completion.finish_reason is FinishReason.STOP
            continue
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if completion.finish_reason is FinishReason.STOP:
            assert fits(form, completion.text), (form, completion.text)
        else:
            assert completion.parsed is None


def test_the_forms_are_served_as_they_should_be(runner: Runner) -> None:
    client = Client(runner, make_tokenizer())
    kinds = [type(client.grammars.submit(form).result()) for form in FORMS]
    assert kinds == [OnDevice] * 5 + [OnHost] * 3


@pytest.mark.parametrize(("overlap", "decode_steps"), [(True, 8), (True, 1), (False, 8)])
def test_a_mixed_batch(runner: Runner, dense: Dense, overlap: bool, decode_steps: int) -> None:
    client = Client(runner, make_tokenizer(), overlap=overlap, decode_steps=decode_steps)
    asks = requests()
    outputs = client.generate(*asks)
    check(outputs, asks, dense, client)
    client.check_idle()


def test_only_device_grammars_keep_device_loops(runner: Runner, dense: Dense) -> None:
    """With no row on the host a step still makes several tokens."""
    client = Client(runner, make_tokenizer(), decode_steps=8)
    asks = [what for what in requests(max_tokens=28) if not isinstance(what.params.structured, Grammar)]
    outputs = client.generate(*asks)
    check(outputs, asks, dense, client)
    num_tokens = sum(len(only(output).token_ids) for output in outputs)
    assert client.engine.stats().num_steps < num_tokens / 4


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption(runner: Runner, dense: Dense, overlap: bool) -> None:
    """Grammar states are made again from the tokens (behaviour 11)."""
    client = Client(runner, make_tokenizer(), overlap=overlap, num_pages=13, prefix_cache=False)
    asks = requests()
    outputs = client.generate(*asks)
    assert client.engine.stats().num_preemptions > 3
    check(outputs, asks, dense, client)
    client.check_idle()


def test_more_grammars_than_fit_wait_for_room(runner: Runner, dense: Dense) -> None:
    client = Client(runner, make_tokenizer())
    room = client.engine.scheduler._roster.grammars
    forms = [Regex(f"[a-f]{{2,6}}{i}[0-9]") for i in range(24)]  # 8 fit at once
    asks = [ask(TEXT[i : i + 9], structured=form, temperature=1.2, seed=i) for i, form in enumerate(forms)] * 2
    outputs = client.generate(*asks)
    check(outputs, asks, dense, client)
    assert room.num_resident == 8 and room.num_loads >= 24
    client.check_idle()


def test_fifty_grammars_compile_nothing(runner: Runner) -> None:
    """No XLA program comes with a grammar, the first one included once the engine is warm."""
    client = Client(runner, make_tokenizer())
    client.generate(ask(TEXT[:9], structured=Regex("[a-f]+"), max_tokens=4))
    before = dict(runner.num_traces)
    client.generate(*[ask(TEXT[:9], structured=Regex(f"[a-f]{{1,{i + 1}}}x?"), max_tokens=9) for i in range(50)])
    assert dict(runner.num_traces) == before


FIELDS = [
    dict(temperature=0, min_tokens=30),
    dict(temperature=0, logit_bias={EOS[0]: 50.0, 70: 9.0}),
    dict(temperature=0, logit_bias={EOS[0]: -50.0}),
    dict(temperature=0, repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4),
    dict(temperature=0.9, top_k=3, top_p=0.8, seed=4),
    dict(temperature=0, stop_token_ids=(40,)),
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_with_every_other_field(runner: Runner, dense: Dense, fields: dict) -> None:
    client = Client(runner, make_tokenizer())
    asks = [
        ask(TEXT[:9], max_tokens=30, structured=form, **fields) for form in (Regex("[a-f]{3,40}"), JsonSchema(OBJECT))
    ]
    check(client.generate(*asks), asks, dense, client)


def test_with_logprobs_n_and_bad_words(runner: Runner) -> None:
    client = Client(runner, make_tokenizer())
    what = ask(
        TEXT[:9], max_tokens=12, structured=Regex("[a-f]{3,8}"), n=4, temperature=1.0, logprobs=2, bad_words=("a", "b")
    )
    (output,) = client.generate(what)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[c-f]{3,8}", text) for text in texts) and len({*texts}) > 1
    for completion in output.outputs:
        assert len(completion.logprobs) == len(completion.token_ids)


def test_bad_words_give_way_where_the_grammar_leaves_nothing_else(runner: Runner) -> None:
    client = Client(runner, make_tokenizer())
    (output,) = client.generate(ask(TEXT[:9], structured=Choice(["aa"]), bad_words=("a",)))
    assert only(output).text == "aa"


def test_allowed_token_ids_are_part_of_the_grammar(runner: Runner) -> None:
    """A dead end between the two is seen before it is entered, or at admission."""
    client = Client(runner, make_tokenizer())
    ids = tuple(make_tokenizer().encode("abdf1"))
    asks = [
        ask(
            TEXT[:9],
            max_tokens=12,
            structured=Regex("(a[bc]|[de]c|f)+[12]"),
            allowed_token_ids=ids,
            temperature=1.5,
            seed=s,
        )
        for s in range(6)
    ]
    for output in client.generate(*asks):
        assert re.fullmatch("(ab|f)+1", only(output).text)
    impossible = ask(TEXT[:9], structured=Regex("a+c"), allowed_token_ids=ids)
    (output,) = client.generate(impossible)
    assert only(output).finish_reason is FinishReason.ERROR
    assert "allowed_token_ids: no text that the grammar allows" in (only(output).error or "")
    with pytest.raises(RequestError, match="allowed_token_ids: no text that the grammar allows"):
        client.submit(impossible, refuse=True)


def test_a_stop_id_is_never_text_under_a_grammar(runner: Runner) -> None:
    """It ends the output where that is complete; elsewhere other tokens are found, or it is refused."""
    client = Client(runner, make_tokenizer())
    a = make_tokenizer().encode("a")[0]
    fields = dict(stop_token_ids=(a,), ignore_eos=True, temperature=1.5)
    asks = [ask(TEXT[:9], max_tokens=9, structured=Regex("(a|b)+[cd]|ab*"), seed=s, **fields) for s in range(6)]
    for output in client.generate(*asks):
        completion = only(output)
        assert re.fullmatch("((a|b)+[cd]|ab*)a", completion.text) and completion.stop_reason == a
        assert completion.token_ids.index(a) == len(completion.token_ids) - 1
    number = JsonSchema({"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}, closed=True)
    for changes in ({}, dict(stop_token_ids=(), ignore_eos=False, skip_special_tokens=False)):
        (output,) = client.generate(ask(TEXT[:9], max_tokens=30, structured=number, seed=1, **(fields | changes)))
        completion = only(output)
        assert completion.error is None and isinstance(completion.parsed["b"], int)
        assert completion.text.startswith(json.dumps(completion.parsed, separators=(",", ":")))
        assert completion.text[-1] != "}", "what ended the output is part of its text, not of its value"
    for form, message in [(Choice(["a"]), "stop_token_ids: no text that the grammar allows"),
                          (FORMS[5], "grammar with stop_token_ids: only grammars that fit the device")]:  # fmt: skip
        (output,) = client.generate(ask(TEXT[:9], structured=form, **fields))
        assert only(output).finish_reason is FinishReason.ERROR and message in (only(output).error or "")


def test_whole_within_any_budget(runner: Runner) -> None:
    """From the fewest tokens that are possible on (behaviour: complete within max_tokens); refused below."""
    client = Client(runner, make_tokenizer())
    least = client.grammars.submit(JsonSchema(OBJECT)).result().min_tokens
    asks = [
        ask(TEXT[i : i + 5], max_tokens=least + i % 12, structured=JsonSchema(OBJECT), temperature=3.0, seed=i)
        for i in range(60)
    ]
    for output, what in zip(client.generate(*asks), asks, strict=True):
        completion = only(output)
        assert completion.finish_reason is FinishReason.STOP and fits(what.params.structured, completion.text)
        assert completion.parsed == json.loads(completion.text)
    with pytest.raises(RequestError, match=rf"max_tokens={least - 1} is too few: .* takes {least} tokens"):
        client.submit(ask(TEXT[:5], max_tokens=least - 1, structured=JsonSchema(OBJECT)), refuse=True)
    with pytest.raises(RequestError, match="prompt_len=90 leaves 6 of max_len=96 tokens"):
        client.submit(ask(TEXT[:90], max_tokens=50, structured=JsonSchema(OBJECT)), refuse=True)


def test_a_prompt_is_computed_while_its_grammar_is_compiled(runner: Runner, monkeypatch) -> None:
    """And keeps neither row nor pages; then the output is what it is when the grammar was there before."""
    client = Client(runner, make_tokenizer())
    form, prompt = Regex("[a-f]{3}"), TEXT[:40]
    (before,) = client.run(client.submit(ask(prompt, structured=form, seed=3)))
    client.engine.scheduler.clear_cache()
    ready = client.grammars.submit(form).result()
    future: concurrent.futures.Future = concurrent.futures.Future()
    monkeypatch.setattr(client.grammars, "submit", lambda *_: future)
    waiting = client.submit(ask(prompt, structured=form, seed=3))
    aborted = client.submit(ask(prompt, structured=form), name="aborted")
    free = client.submit(ask(TEXT[50:59], max_tokens=20, ignore_eos=True))
    client.run(free)
    stats = client.engine.stats()
    assert waiting.output is None and stats.pages_used == 0 and stats.num_requests == 2 and stats.num_running == 0
    client.engine.scheduler.check()
    client.engine.abort("aborted")
    assert only(aborted.output).finish_reason is FinishReason.ABORT
    future.set_result(ready)
    num_steps = client.engine.stats().num_steps
    (output,) = client.run(waiting)
    assert only(output).token_ids == only(before).token_ids and re.fullmatch("[a-f]{3}", only(output).text)
    assert output.cached_tokens == 0 and output.cache_written_tokens > 0, "it computed its prompt itself"
    assert client.engine.stats().num_steps - num_steps <= 4
    client.check_idle()


def test_a_grammar_that_fails_oddly_ends_its_request_only(runner: Runner, monkeypatch) -> None:
    client = Client(runner, make_tokenizer())
    future: concurrent.futures.Future = concurrent.futures.Future()
    free = client.submit(ask(TEXT[50:59], max_tokens=20, ignore_eos=True))
    monkeypatch.setattr(client.grammars, "submit", lambda *_: future)
    odd = client.submit(ask(TEXT[:40], structured=Regex("[a-f]{3}"), n=2))
    client.engine.step()
    future.set_exception(RecursionError("too deep"))
    (output,) = client.run(odd)
    assert [(each.finish_reason, each.error) for each in output.outputs] == [
        (FinishReason.ERROR, "the grammar failed: RecursionError('too deep')")
    ] * 2
    (output,) = client.run(free)
    assert len(only(output).token_ids) == 20
    client.check_idle()


def test_eos_is_suppressed_until_json_is_complete(runner: Runner) -> None:
    """Free text otherwise: its tokens are those of a free row with end tokens forbidden until then."""
    client = Client(runner, make_tokenizer())
    close = dict.fromkeys(make_tokenizer().encode("[]1,"), 6.0) | {EOS[0]: 6.0}
    asks = [
        ask(TEXT[:9], max_tokens=60, temperature=1.0, seed=s, logit_bias=close, suppress_eos_until="json")
        for s in range(8)
    ]
    reasons = []
    for output in client.generate(*asks):
        completion = only(output)
        reasons.append(completion.finish_reason)
        if completion.finish_reason is FinishReason.STOP:
            assert any(_is_json(completion.text[i:j]) for i in range(60) for j in range(i + 2, 90))
    assert FinishReason.STOP in reasons
    plain = client.generate(
        *[ask(TEXT[:9], max_tokens=60, temperature=1.0, seed=s, logit_bias=close) for s in range(8)]
    )
    assert not all(any(_is_json(only(o).text[i:j]) for i in range(60) for j in range(i + 2, 90)) for o in plain)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), (dict, list))
    except ValueError:
        return False


def test_no_end_token_no_structure(runner: Runner) -> None:
    client = Client(runner, make_tokenizer())
    with pytest.raises(RequestError, match="structured output ends with an end token, and there is none"):
        client.submit(ask(TEXT[:9], structured=Regex("a"), ignore_eos=True))


def test_what_the_grammar_lacks_is_named(runner: Runner) -> None:
    client = Client(runner, make_tokenizer())
    cases = [
        (Regex("a("), "a\\("), (Grammar("start: nothing"), "nothing"), (Grammar("root ::= (", "gbnf"), "grammar: "),
        (JsonSchema({"type": "strin"}), "strin"),
    ]  # fmt: skip
    for form, message in cases:
        (output,) = client.generate(ask(TEXT[:9], structured=form))
        assert only(output).finish_reason is FinishReason.ERROR
        assert re.search(message, only(output).error or ""), only(output).error


@pytest.mark.slow
def test_on_two_data_shards() -> None:
    """Tables are on every device, rows and their states on one; shards take different grammars at once."""
    rows = MAX_ROWS // 2
    table = dataclasses.replace(BUCKETS, decode_rows=(rows,), mixed_rows=(rows,), setups=(rows,), page_copies=(rows,))
    asks = requests()
    (one, two) = (
        Client(runner_, make_tokenizer()).generate(*asks)
        for runner_ in (make_runner(), make_runner(data=2, buckets=table))
    )
    for what, a, b in zip(asks, one, two, strict=True):
        assert only(a).token_ids == only(b).token_ids, what

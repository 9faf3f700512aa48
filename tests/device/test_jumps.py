"""Tokens that a grammar leaves no choice about are computed in chunks: fewer steps, the same tokens (behaviours 11, 18, 19)."""

from typing import Any

import pytest

from jaxkv.device.runner import Runner
from jaxkv.request import RequestOutput
from jaxkv.schedule import planner
from jaxkv.structured import Choice, Form, JsonSchema, Regex
from tests.device.dense import Dense
from tests.device.engine_stage import Ask, Client, ask, canonical_vocabulary, make_tokenizer, only
from tests.device.test_structured import OBJECT, TEXT, check

FORMS: list[Form] = [
    Regex("abcdef-abcdef-[0-9]{2}-fedcba[0-9]fedcba"),
    Choice(["abcdefabcdef", "abcdeff"]),
    JsonSchema(OBJECT),
    Regex("a[0-9]b[0-9]c[0-9]"),
    Regex("(decade|facade)s{0,1}-[a-f]{2,9}-decadedecade"),
]


def requests(**changes: Any) -> list[Ask]:
    asks: list[Ask] = []
    for number in range(2):
        for index, form in enumerate(FORMS):
            fields = dict(max_tokens=40, temperature=1.5 * number, seed=100 * number + index, structured=form)
            asks.append(ask(TEXT[index * 5 : index * 9 + 3 + number], **(fields | changes)))
        asks += [ask(TEXT[number : 20 + number], max_tokens=25, ignore_eos=True, seed=1, temperature=1.0)]
    return asks


def run(runner: Runner, asks: list[Ask], *, jumps: bool = True, **config: Any) -> tuple[Client, list[RequestOutput]]:
    with pytest.MonkeyPatch.context() as patch:
        if not jumps:
            patch.setattr(planner, "give_forced", lambda *_: None)
            patch.setattr(planner, "find_jumps", lambda *_: {})
        client = Client(runner, make_tokenizer(), vocabulary=canonical_vocabulary, **config)
        outputs = client.run(*[client.submit(what, stream=True) for what in asks])
    client.check_idle()
    return client, outputs


SETTINGS = [
    dict(overlap=True, decode_steps=1), dict(overlap=False, decode_steps=1), dict(overlap=True, decode_steps=4),
    dict(overlap=True, decode_steps=1, num_pages=13, prefix_cache=False),  # preemption
    dict(overlap=True, decode_steps=1, token_budget=16), dict(overlap=True, decode_steps=8, num_pages=16),
]  # fmt: skip


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_jumps_change_no_token(runner: Runner, dense: Dense, config: dict[str, Any]) -> None:
    asks = requests()
    client, outputs = run(runner, asks, **config)
    check(outputs, asks, dense, client)  # token for token what the slow oracle makes of the tables
    plain, without = run(runner, asks, jumps=False, **config)
    assert [only(o).token_ids for o in outputs] == [only(o).token_ids for o in without]
    assert plain.engine.stats().num_forced_tokens == 0 < client.engine.stats().num_forced_tokens
    if config.get("num_pages", 99) < 16:
        assert client.engine.stats().num_preemptions > 0


def test_jumps_save_steps(runner: Runner) -> None:
    """Two runs of forced text at the beginning and behind a digit, each in one step."""
    what = ask(TEXT[:9], max_tokens=40, structured=FORMS[0], ignore_eos=False)
    for overlap in (True, False):
        client, (output,) = run(runner, [what], overlap=overlap, decode_steps=1)
        plain, _ = run(runner, [what], jumps=False, overlap=overlap, decode_steps=1)
        saved = plain.engine.stats().num_steps - client.engine.stats().num_steps
        num_forced = client.engine.stats().num_forced_tokens
        assert num_forced >= 14 + 5 and saved == num_forced, (num_forced, saved, only(output).text)


@pytest.mark.parametrize(
    "fields",
    [
        dict(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4), dict(bad_words=("3", "f-", "d")),
        dict(min_tokens=30), dict(max_tokens=33), dict(logit_bias={70: 9.0, 20: 5.0}),
    ],
    ids=str,
)  # fmt: skip
def test_jumps_count_for_every_other_field(runner: Runner, fields: dict[str, Any]) -> None:
    """Penalties, bad words and budgets see forced tokens as any others (behaviour 19)."""
    asks = [what for what in requests(**fields) if what.params.structured is not None]
    client, outputs = run(runner, asks, decode_steps=1)
    assert client.engine.stats().num_forced_tokens > 0
    _, without = run(runner, asks, jumps=False, decode_steps=1)
    assert [only(o).token_ids for o in outputs] == [only(o).token_ids for o in without]


def test_stop_strings_end_inside_forced_text(runner: Runner) -> None:
    asks = [ask(TEXT[:9], max_tokens=40, structured=FORMS[0], stop=(stop,)) for stop in ("f-a", "def-", "-f", "ba9")]
    for overlap in (True, False):
        _, outputs = run(runner, asks, decode_steps=1, overlap=overlap)
        _, without = run(runner, asks, decode_steps=1, overlap=overlap, jumps=False)
        assert [only(o) for o in outputs] == [only(o) for o in without]
        assert only(outputs[0]).text == "abcde"


def test_whoever_wants_logprobs_gets_all_of_them(runner: Runner) -> None:
    what = ask(TEXT[:9], max_tokens=40, structured=FORMS[0], logprobs=2)
    client, (output,) = run(runner, [what], decode_steps=1)
    assert client.engine.stats().num_forced_tokens == 0
    assert len(only(output).logprobs or ()) == len(only(output).token_ids)


def test_completions_of_one_prompt_and_a_warm_cache(runner: Runner) -> None:
    """The forced beginning is computed by each; what the cache has of it counts as no prompt token."""
    what = ask(TEXT[:25], max_tokens=40, structured=FORMS[0], n=3, temperature=1.0)
    client = Client(runner, make_tokenizer(), vocabulary=canonical_vocabulary, decode_steps=1)
    for _ in range(2):
        (output,) = client.generate(what)
        texts = [completion.text for completion in output.outputs]
        assert len({*texts}) == 3 and all(text.startswith("abcdef-abcdef-") for text in texts)
        counts = output.cached_tokens, output.cache_written_tokens, output.uncached_tokens
        assert sum(counts) == 25 and min(counts) >= 0 and output.cached_tokens <= 25
    client.check_idle()


def test_an_abort_right_after_a_jump(runner: Runner) -> None:
    client = Client(runner, make_tokenizer(), vocabulary=canonical_vocabulary, decode_steps=1)
    for steps in range(1, 9):
        builder = client.submit(ask(TEXT[:9], max_tokens=40, structured=FORMS[0]), stream=True, name=f"a{steps}")
        for _ in range(steps):
            client.engine.step()
        client.engine.abort(f"a{steps}")
        output = builder.output
        assert output is not None
        assert "abcdef-abcdef-".startswith(only(output).text[:14])
        client.check_idle()

"""Sessions on the real engine: a dense model that knows no pages says what each turn must give."""

import re

import numpy as np
import pytest

from jaxkv.api import LLM
from jaxkv.device.runner import Runner
from jaxkv.device.settings import EngineConfig
from jaxkv.errors import RequestError
from jaxkv.request import FinishReason, RequestOutput
from jaxkv.structured import Choice, Regex
from jaxkv.tokenizer.base import Tokenizer
from tests.device.dense import Dense
from tests.device.engine_stage import EOS, Ask, Client, ask, make_tokenizer, only
from tests.device.stage import PAGE, V

TOKENS = np.random.default_rng(9).integers(3, V, 200).tolist()


def make(runner: Runner, tokenizer: Tokenizer | None = None, **config) -> tuple[LLM, Client]:
    client = Client(runner, tokenizer, **config)
    return LLM("tiny", client.engine, client._intake, EngineConfig()), client


def check(dense: Dense, what: Ask, output: RequestOutput) -> None:
    asked = Ask(prompt=output.prompt_token_ids, params=what.params)
    assert only(output).token_ids == dense.generate(asked.row())


@pytest.mark.parametrize("overlap", [True, False])
def test_turns_forks_and_cuts_give_the_dense_models_tokens(runner: Runner, dense: Dense, overlap: bool) -> None:
    llm, client = make(runner, overlap=overlap)
    what = ask((), max_tokens=6, ignore_eos=True)
    with llm.session(TOKENS[:19]) as session:
        check(dense, what, session.generate(TOKENS[19:22], what.params))
        promised = session.report()
        assert promised.kept_tokens == 27 // PAGE * PAGE
        forks = [session.fork() for _ in range(3)]
        turns = [fork.start(TOKENS[30 * i : 30 * i + 5 + i], what.params) for i, fork in enumerate(forks)]
        for turn in turns:
            output = turn.result()
            assert output.cached_tokens == promised.kept_tokens
            check(dense, what, output)
        assert len({tuple(fork.token_ids) for fork in forks}) == 3
        report = session.replace_tail(TOKENS[50:60], 18)
        assert (report.kept_tokens, report.recomputed_tokens) == (16, 12)
        output = session.generate(TOKENS[60:61], what.params)
        assert output.cached_tokens == 16
        check(dense, what, output)
        for fork in forks:
            fork.close()
    client.check_idle()


def test_under_pressure_what_a_session_lost_is_computed_again(runner: Runner, dense: Dense) -> None:
    llm, client = make(runner, num_pages=9)
    what = ask((), max_tokens=6, ignore_eos=True)
    session = llm.session(TOKENS[:40])
    session.prefill()
    check(dense, what, llm.generate([TOKENS[100:155]], what.params, progress=False)[0])
    assert llm._engine.stats().num_held_evictions > 0
    promised = session.report().kept_tokens
    assert 0 <= promised < 40
    output = session.generate(TOKENS[40:42], what.params)
    assert output.cached_tokens == promised
    check(dense, what, output)
    session.close()
    client.check_idle()


def test_structured_turns_stop_strings_and_an_end_in_the_middle(runner: Runner) -> None:
    llm, client = make(runner, make_tokenizer())
    free = ask((), max_tokens=8, ignore_eos=True).params
    with llm.session(TOKENS[:19]) as session:
        output = session.generate(TOKENS[19:22], ask((), structured=Choice(["abab", "fade"]), max_tokens=12).params)
        assert only(output).text in ("abab", "fade")
        said = [token for token in only(output).token_ids if token not in EOS]
        assert session.token_ids == [*TOKENS[:22], *said], "the model's own end is not part of it"
        before = session.token_ids
        with pytest.raises(RequestError):
            session.generate("a", ask((), structured=Regex("(")).params)
        assert session.token_ids == before and not session.is_running
        child = session.fork()
        grandchild = child.fork()
        turns = [
            child.start(TOKENS[30:33], ask((), structured=Regex("[a-f]{3,9}-[0-9]{2}"), max_tokens=16).params),
            grandchild.start(TOKENS[40:43], free),
        ]
        structured, plain = (turn.result() for turn in turns)
        assert re.fullmatch("[a-f]{3,9}-[0-9]{2}", only(structured).text)
        assert structured.cached_tokens == plain.cached_tokens > 0
        text = only(plain).text
        stopped = session.fork().generate(TOKENS[40:43], ask((), max_tokens=8, ignore_eos=True, stop=text[3]).params)
        assert only(stopped).text == text[: text.index(text[3])]
        running = session.start("a", ask((), structured=Regex("[ab]{20,40}"), max_tokens=60).params)
        client.engine.step()
    assert running.output is not None and only(running.output).finish_reason is FinishReason.ABORT
    assert child.token_ids[: len(before)] == before
    child.close()
    grandchild.close()
    client.check_idle()

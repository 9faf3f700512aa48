"""Sessions on the real engine: a dense model that knows no pages says what each turn must give."""

import numpy as np
import pytest

from jaxkv.api import LLM
from jaxkv.request import RequestOutput
from jaxkv.runner import Runner
from jaxkv.settings import EngineConfig
from tests.device.dense import Dense
from tests.device.engine_stage import Ask, Client, ask, only
from tests.device.stage import PAGE, V

TOKENS = np.random.default_rng(9).integers(3, V, 200).tolist()


def make(runner: Runner, **config) -> tuple[LLM, Client]:
    client = Client(runner, **config)
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

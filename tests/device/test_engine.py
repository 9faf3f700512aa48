"""Requests give the same tokens whatever happens around them: batch mates, preemption, a warm cache, overlap, chunks."""

import numpy as np
import pytest

from jaxkv.device.runner import InFlight, Runner
from jaxkv.request import FinishReason
from tests.device.dense import Dense
from tests.device.engine_stage import Ask, Client, ask, check_tokens, only
from tests.device.stage import MAX_LEN, PAGE, V

RNG = np.random.default_rng(7)
TEXT = tuple(RNG.integers(3, V, 200).tolist())
SHARED = TEXT[100:130]  # a beginning that some prompts share

# Lengths, fields and endings of all kinds.
MIX = [
    ask(TEXT[:1]),
    ask(TEXT[3:20], temperature=1.0, seed=11),
    ask(SHARED + TEXT[:9], max_tokens=7),
    ask(SHARED + TEXT[9:12], temperature=0.8, top_k=20, top_p=0.9, seed=5),
    ask(TEXT[40:89], max_tokens=40, ignore_eos=True),
    ask(TEXT[20:36], repetition_penalty=1.4, frequency_penalty=0.3, stop_token_ids=(5, 17, 40, 60)),
    ask(SHARED, temperature=1.5, min_p=0.05, presence_penalty=0.9, seed=-3),
    ask(TEXT[90:97], min_tokens=12, stop_token_ids=tuple(range(3, 34)), max_tokens=30),
    ask(TEXT[60:68], temperature=0.6, seed=2**63, logit_bias={7: 4.0, 9: -9.0}, allowed_token_ids=tuple(range(2, 60))),
    ask(SHARED + TEXT[:9], max_tokens=30),
    ask(TEXT[:31], temperature=1.2, seed=1, ignore_eos=True, max_tokens=25),
    ask(TEXT[150:200], max_tokens=1),
]


def check(outputs: list, asks: list[Ask], dense: Dense) -> None:
    for output, what in zip(outputs, asks, strict=True):
        check_tokens(output, what, dense)


def test_the_mix_is_mixed(dense: Dense) -> None:
    """It would prove little if all outputs were alike: some stop, some are cut, and none repeats one token."""
    outputs = [dense.generate(what.row()) for what in MIX]
    ended = [len(tokens) < what.params.max_tokens for tokens, what in zip(outputs, MIX, strict=True)]
    assert 2 <= sum(ended) <= len(MIX) - 4
    assert all(len({*tokens}) > 3 for tokens in outputs if len(tokens) > 8)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("decode_steps", [1, 4, 8])
def test_overlap_and_device_loops(runner: Runner, dense: Dense, overlap: bool, decode_steps: int) -> None:
    """Three times as many requests as rows (behaviour 18)."""
    client = Client(runner, overlap=overlap, decode_steps=decode_steps)
    check(client.generate(*MIX), MIX, dense)
    client.check_idle()


@pytest.mark.parametrize(("overlap", "order"), [(True, "ddrdrdrr"), (False, "drdrdrdr")])
def test_overlap_dispatches_before_it_reads(runner: Runner, monkeypatch, overlap: bool, order: str) -> None:
    seen: list[str] = []
    dispatch, result = runner.dispatch, InFlight.result
    monkeypatch.setattr(runner, "dispatch", lambda plan: seen.append("d") or dispatch(plan))
    monkeypatch.setattr(InFlight, "result", lambda self: seen.append("r") or result(self))
    Client(runner, overlap=overlap).generate(ask(TEXT[:9], max_tokens=25, ignore_eos=True))
    assert "".join(seen) == order


@pytest.mark.parametrize("token_budget", [11, 24, 40])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_chunks(runner: Runner, dense: Dense, token_budget: int, prefix_cache: bool) -> None:
    """From one tile of prompt a step up."""
    client = Client(runner, token_budget=token_budget, prefix_cache=prefix_cache)
    check(client.generate(*MIX), MIX, dense)
    assert (client.engine.stats().num_hit_tokens > 0) == prefix_cache
    client.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("decode_steps", [1, 8])
def test_preemption(runner: Runner, dense: Dense, overlap: bool, prefix_cache: bool, decode_steps: int) -> None:
    """A pool that holds the longest request and little more; sequences come back with seed, penalties and counts."""
    client = Client(
        runner, overlap=overlap, prefix_cache=prefix_cache, num_pages=14, token_budget=24, decode_steps=decode_steps
    )
    outputs = client.generate(*MIX)
    check(outputs, MIX, dense)
    assert client.engine.stats().num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == client.engine.stats().num_preemptions
    client.check_idle()


@pytest.mark.parametrize("max_rows", [1, 2])
def test_few_rows(runner: Runner, dense: Dense, max_rows: int) -> None:
    client = Client(runner, max_rows=max_rows)
    check(client.generate(*MIX), MIX, dense)
    client.check_idle()


def test_warm_cache(runner: Runner, dense: Dense) -> None:
    """A second and third time, in other orders: what generated tokens left in the cache is right too."""
    client = Client(runner, num_pages=200)  # nothing is evicted
    for order in (MIX, MIX[::-1], MIX[5:] + MIX[:5]):
        check(client.generate(*order), order, dense)
    longer = [ask(what.prompt + dense.generate(what.row()), max_tokens=9) for what in MIX[1:5]]
    outputs = client.generate(*longer)
    check(outputs, longer, dense)
    for output in outputs:
        assert output.cached_tokens >= (len(output.prompt_token_ids) - 2) // PAGE * PAGE
    client.check_idle()


@pytest.mark.parametrize("pages", [1, 2, 5])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_a_page_twice(runner: Runner, dense: Dense, pages: int, extra: int) -> None:
    """At least the last token is computed; the rest comes in whole pages (behaviour 2)."""
    what, client = ask(TEXT[: pages * PAGE + extra]), Client(runner)
    first, second = client.generate(what)[0], client.generate(what)[0]
    check([first, second], [what, what], dense)
    assert first.cached_tokens == 0
    assert second.cached_tokens == (len(what.prompt) - 1) // PAGE * PAGE
    client.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [61, 12])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 30])
def test_forks(runner: Runner, dense: Dense, prompt_len: int, num_pages: int, overlap: bool) -> None:
    """n completions from one prefill: each is the one its child index gives alone, other requests beside them."""
    asks = [
        ask(TEXT[:prompt_len], temperature=1.0, n=5, seed=4, max_tokens=15),
        ask(TEXT[50:75], n=2, max_tokens=9),
        ask(TEXT[:prompt_len], temperature=1.0, seed=5, max_tokens=15),
    ]
    client = Client(runner, num_pages=num_pages, overlap=overlap)
    outputs = client.generate(*asks)
    check(outputs, asks, dense)
    assert len({completion.token_ids for completion in outputs[0].outputs}) == 5, "children differ"
    client.check_idle()


def test_endings(runner: Runner) -> None:
    """Why each output ended, and which of the user's own ids did it."""
    first = only(Client(runner).generate(ask(TEXT[:9], ignore_eos=True))[0])
    assert first.finish_reason is FinishReason.LENGTH and first.stop_reason is None and len(first.token_ids) == 20
    client, token = Client(runner), first.token_ids[4]
    stopped = only(client.generate(ask(TEXT[:9], ignore_eos=True, stop_token_ids=(token,)))[0])
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_reason == token
    assert stopped.token_ids == first.token_ids[: first.token_ids.index(token) + 1]
    ended = only(client.generate(ask(TEXT[:9], logit_bias={2: 100.0}))[0])
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ((2,), FinishReason.STOP, None)
    full = only(client.generate(ask(TEXT[: MAX_LEN - 3], ignore_eos=True, max_tokens=500))[0])
    assert full.finish_reason is FinishReason.LENGTH and len(full.token_ids) == 3
    client.check_idle()


def test_two_devices(runner_on_two: Runner, dense: Dense) -> None:
    """Weights and K/V heads split over two devices: the same tokens, preemption included."""
    client = Client(runner_on_two, num_pages=14, token_budget=24)
    check(client.generate(*MIX), MIX, dense)
    assert client.engine.stats().num_preemptions > 0
    client.check_idle()

"""Log-probabilities as a caller sees them: finite, complete, and right with a warm cache, chunks and preemption."""

import math

import numpy as np
import pytest

from jaxkv.device.runner import Runner
from jaxkv.events import NewTokens
from jaxkv.outputs import LOWEST_LOGPROB, token_logprobs
from jaxkv.request import FinishReason, RequestOutput, TokenLogprobs
from tests.device.dense import Dense
from tests.device.engine_stage import Ask, Client, ask, check_tokens, only
from tests.device.stage import PAGE, V

TEXT = tuple(np.random.default_rng(9).integers(3, V, 80).tolist())
TOLERANCE = 5e-4


def check_entry(entry: TokenLogprobs, token: int, expected: np.ndarray, num_top: int) -> None:
    assert entry.token_id == token
    assert math.isclose(entry.logprob, expected[token], abs_tol=TOLERANCE)
    assert len(entry.top) == num_top
    best = np.sort(expected)[::-1][:num_top]
    np.testing.assert_allclose([logprob for _, logprob in entry.top], best, atol=TOLERANCE)
    np.testing.assert_allclose([expected[token] for token, _ in entry.top], best, atol=TOLERANCE)


def check_prompt(output: RequestOutput, what: Ask, dense: Dense) -> None:
    """One entry a prompt token; the first has none, for nothing precedes it."""
    scores, num_top = output.prompt_logprobs, what.params.prompt_logprobs
    assert scores is not None and num_top is not None
    assert len(scores) == len(what.prompt) and scores[0] is None
    expected = dense.logprobs(what.prompt)
    for position, entry in enumerate(scores[1:]):
        assert entry is not None
        check_entry(entry, what.prompt[position + 1], expected[position], num_top)


def check_output(output: RequestOutput, what: Ask, dense: Dense) -> None:
    for completion in output.outputs:
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        expected = dense.logprobs(what.prompt + completion.token_ids)[len(what.prompt) - 1 :]
        for entry, token, row in zip(completion.logprobs, completion.token_ids, expected, strict=False):
            check_entry(entry, token, row, what.params.logprobs or 0)


@pytest.mark.parametrize(
    "settings", [{}, dict(token_budget=11, decode_steps=1), dict(num_pages=11, token_budget=24)], ids=str
)
@pytest.mark.parametrize("overlap", [True, False])
def test_everything_at_once(runner: Runner, dense: Dense, overlap: bool, settings: dict) -> None:
    """Scores, log-probabilities and requests that want neither, in one batch; twice, so that the cache is warm."""
    asks = [
        ask(TEXT[:30], logprobs=0, prompt_logprobs=0),
        ask(TEXT[:33], temperature=1.3, seed=8, logprobs=5, top_k=4),
        ask(TEXT[:17]),
        ask(TEXT[:24], prompt_logprobs=20, logprobs=20, n=3, temperature=1.0),
        ask(TEXT[30:62], prompt_logprobs=3, max_tokens=30, ignore_eos=True),
        ask(TEXT[40:41], prompt_logprobs=3),
    ]
    client = Client(runner, overlap=overlap, **settings)
    for _ in range(2):
        outputs = client.generate(*asks)
        for output, what in zip(outputs, asks, strict=True):
            check_tokens(output, what, dense)
            if what.params.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                check_prompt(output, what, dense)
            if what.params.logprobs is None:
                assert all(completion.logprobs is None for completion in output.outputs)
            else:
                check_output(output, what, dense)
    if "num_pages" in settings:
        assert client.engine.stats().num_preemptions > 0
    client.check_idle()


@pytest.mark.parametrize("prompt_len", [1, 2, 7, 8, 9, 16, 40])
def test_scoring_without_generating(runner: Runner, dense: Dense, prompt_len: int) -> None:
    """max_tokens=0 (behaviour 36); the pages it leaves serve the next request, the pages it finds serve it not."""
    what, client = ask(TEXT[:prompt_len], max_tokens=0, prompt_logprobs=1), Client(runner)
    for _ in range(2):
        output = client.generate(what)[0]
        check_prompt(output, what, dense)
        completion = only(output)
        assert (completion.token_ids, completion.text) == ((), "")
        assert completion.finish_reason is FinishReason.LENGTH
        assert prompt_len == 1 or output.cached_tokens == 0
    follower = client.generate(ask(TEXT[:prompt_len]))[0]
    check_tokens(follower, ask(TEXT[:prompt_len]), dense)
    assert follower.cached_tokens == (prompt_len - 1) // PAGE * PAGE
    client.check_idle()


@pytest.mark.parametrize("start", [1, 8, 9, 17, 39])
@pytest.mark.parametrize("settings", [{}, dict(token_budget=11), dict(num_pages=11, token_budget=24)], ids=str)
def test_only_the_end_is_scored(runner: Runner, dense: Dense, start: int, settings: dict) -> None:
    """What stands before the first scored token may come from the cache, and scores are as without it."""
    what = ask(TEXT[:40], max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=start)
    busy = ask(TEXT[10:50], max_tokens=30, ignore_eos=True, prompt_logprobs=2, prompt_logprobs_from=20)
    expected, client = dense.logprobs(what.prompt), Client(runner, **settings)
    for num_cached in (0, (start - 1) // PAGE * PAGE):
        output, other = client.generate(what, busy)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 40
        assert output.prompt_logprobs[:start] == (None,) * start
        for position, entry in enumerate(output.prompt_logprobs[start:], start):
            assert entry is not None
            check_entry(entry, what.prompt[position], expected[position - 1], 1)
        assert output.cached_tokens == num_cached or "num_pages" in settings
        assert (
            other.prompt_logprobs is not None and [entry is None for entry in other.prompt_logprobs].count(True) == 20
        )
        check_tokens(other, busy, dense)
    client.check_idle()


def test_only_finite_numbers_come_out() -> None:
    """A chosen token that the raw logits call impossible still has a number; NaN has none (behaviour 33)."""
    nan, inf = float("nan"), float("inf")
    tokens = NewTokens(
        "r", 0, np.array([4, 5, 6]), np.array([-inf, nan, -0.5], np.float32), np.array([[1, 2], [3, 4], [6, 7]]),
        np.array([[-0.5, -inf], [nan, nan], [-0.5, -2.0]], np.float32),
    )  # fmt: skip
    assert token_logprobs(tokens, 2) == [
        TokenLogprobs(4, LOWEST_LOGPROB, ((1, -0.5),)),
        TokenLogprobs(5, LOWEST_LOGPROB, ()),
        TokenLogprobs(6, -0.5, ((6, -0.5), (7, -2.0))),
    ]


def test_impossible_alternatives_are_left_out(runner: Runner) -> None:
    """Log-probabilities are raw and finite also where masks leave one token."""
    output = Client(runner).generate(ask(TEXT[:5], allowed_token_ids=(9,), logprobs=20, max_tokens=4))[0]
    entries = only(output).logprobs
    assert entries is not None and [entry.token_id for entry in entries] == [9] * 4
    for entry in entries:
        assert math.isfinite(entry.logprob) and all(math.isfinite(logprob) for _, logprob in entry.top)

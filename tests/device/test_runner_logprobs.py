"""Log-probabilities of chosen tokens, alternatives and prompt tokens, against the dense model (behaviour 33)."""

import numpy as np
import pytest

from jaxkv.device.runner import Runner
from jaxkv.plan import StepResult
from jaxkv.request import MAX_LOGPROBS
from tests.device.dense import Dense
from tests.device.sampling import Row, row
from tests.device.stage import Stage, V, decoded, sampled

TOKENS = tuple(np.random.default_rng(2).integers(0, V, 60).tolist())
TOLERANCE = 2e-4


def check(expected: np.ndarray, chosen: int, logprob: float, top_ids: np.ndarray, top: np.ndarray) -> None:
    """One position against its dense log-probabilities [V]."""
    np.testing.assert_allclose(logprob, expected[chosen], atol=TOLERANCE)
    np.testing.assert_allclose(top, np.sort(expected)[::-1][:MAX_LOGPROBS], atol=TOLERANCE)
    np.testing.assert_allclose(top, expected[top_ids], atol=TOLERANCE)
    assert len({*top_ids.tolist()}) == MAX_LOGPROBS


def check_output(result: StepResult, index: int, r: Row, output: tuple[int, ...], dense: Dense) -> tuple[int, ...]:
    """All new tokens of the decode row at `index`; returns its output with them."""
    assert result.decode_logprobs is not None and result.decode_top_ids is not None
    assert result.decode_top_logprobs is not None
    for step, token in enumerate(decoded(result)[index]):
        expected = dense.logprobs(r.prompt + output)[-1]
        check(
            expected, token, result.decode_logprobs[index, step], result.decode_top_ids[index, step],
            result.decode_top_logprobs[index, step],
        )  # fmt: skip
        output = (*output, token)
    return output


def test_sampled_tokens(runner: Runner, dense: Dense) -> None:
    """From chunks, from decode rows beside chunks and from device loops. They are raw: no temperature, no penalty."""
    one = row(prompt=TOKENS[:9], logprobs=0, temperature=2.0, top_k=5, seed=4, presence_penalty=1.5)
    two = row(prompt=TOKENS[9:30], logprobs=20, temperature=0, logit_bias={3: 2.0})
    stage = Stage(runner)
    stage.place(2, one)
    first = stage.run(stage.chunk(2))
    outputs = {2: (sampled(first)[0],)}
    stage.place(0, two)
    both = stage.run(stage.chunk(0), decode=(2,))
    for r, result, at in ((one, first, 2), (two, both, 0)):
        (tokens,) = result.chunks
        assert tokens is not None and tokens.logprobs is not None
        assert tokens.top_ids is not None and tokens.top_logprobs is not None
        outputs[at] = (int(tokens.token_ids[0]),)
        check(
            dense.logprobs(r.prompt)[-1], outputs[at][0], tokens.logprobs[0], tokens.top_ids[0], tokens.top_logprobs[0]
        )
    outputs[2] = check_output(both, 0, one, outputs[2], dense)
    result = stage.run(decode=(0, 2), steps=5)
    for index, (at, r) in enumerate(((0, two), (2, one))):
        assert len(check_output(result, index, r, outputs[at], dense)) == 6 + (at == 2)


def test_only_when_a_row_asks(runner: Runner) -> None:
    stage = Stage(runner)
    stage.place(0, row(prompt=TOKENS[:4], temperature=0))
    stage.place(1, row(prompt=TOKENS[4:7], temperature=0, logprobs=1))
    assert stage.run(stage.chunk(0)).chunks[0].logprobs is None  # type: ignore[union-attr]
    assert stage.run(stage.chunk(1)).chunks[0].logprobs is not None  # type: ignore[union-attr]
    assert stage.run(decode=(0,), steps=2).decode_logprobs is None
    assert stage.run(decode=(0, 1), steps=2).decode_logprobs is not None
    stage.place(1, row(prompt=TOKENS[:4], temperature=0))  # the row's next request does not ask
    stage.run(stage.chunk(1))
    assert stage.run(decode=(0, 1)).decode_logprobs is None


@pytest.mark.parametrize("prompt_len", [2, 8, 9, 31])
@pytest.mark.parametrize("borders", [(), (8,), (8, 16, 24)])
def test_prompt_scores(runner: Runner, dense: Dense, prompt_len: int, borders: tuple[int, ...]) -> None:
    """Chunk by chunk, beside a prompt that wants none; the last entry scores nothing."""
    borders = tuple(b for b in borders if b < prompt_len)
    r, stage = row(prompt=TOKENS[:prompt_len], temperature=0, prompt_logprobs=2), Stage(runner)
    stage.place(1, r)
    stage.place(3, row(prompt=TOKENS[:40], temperature=0))
    expected = dense.logprobs(r.prompt)
    for start, end in zip((0, *borders), (*borders, prompt_len), strict=True):
        result = stage.run(stage.chunk(3, start, start + 8), stage.chunk(1, start, end, prompt_logprobs=2))
        nothing, scores = result.prompt_scores
        assert nothing is None and scores is not None and len(scores.logprobs) == end - start
        for i, position in enumerate(range(start, min(end, prompt_len - 1))):
            check(
                expected[position],
                r.prompt[position + 1],
                scores.logprobs[i],
                scores.top_ids[i],
                scores.top_logprobs[i],
            )

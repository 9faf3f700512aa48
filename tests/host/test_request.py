"""`SamplingParams` refuses what it cannot mean, and names field and value."""

import math

import pytest

from jaxkv.errors import RequestError
from jaxkv.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_IDS, SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=0), dict(temperature=1e6), dict(top_k=0), dict(top_k=10**9), dict(top_p=1), dict(top_p=1e-9),
        dict(min_p=0), dict(min_p=1), dict(repetition_penalty=0.01), dict(frequency_penalty=-2), dict(frequency_penalty=2),
        dict(presence_penalty=-2.0), dict(logprobs=0), dict(logprobs=MAX_LOGPROBS), dict(n=MAX_N), dict(seed=-(2**63)),
        dict(seed=2**64 - 1), dict(max_tokens=0, prompt_logprobs=0), dict(min_tokens=16), dict(logit_bias={}),
        dict(stop_token_ids=tuple(range(MAX_STOP_IDS))), dict(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), -1.0)),
    ],
    ids=str,
)  # fmt: skip
def test_accepted(fields: dict) -> None:
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, "1", None, True)),
        *(("top_k", value) for value in (-1, 1.5, True, None)),
        *(("top_p", value) for value in (0, -0.5, 1.01, math.nan)),
        *(("min_p", value) for value in (-0.01, 1.01, math.nan)),
        *(("repetition_penalty", value) for value in (0, -1, math.inf)),
        *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1, math.nan)),
        *(("n", value) for value in (0, -1, MAX_N + 1, 1.0)),
        *(("max_tokens", value) for value in (-1, 0, 1.5, None)),
        *(("min_tokens", value) for value in (-1, 17)),
        *(("seed", value) for value in (2**64, -(2**63) - 1, 0.5, True)),
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, MAX_LOGPROBS + 1, True, 1.0)),
        *(("prompt_logprobs_from", value) for value in (-1, 1.0, True, 3)),
        *(("stop", value) for value in ("", ("a", ""), (b"a",))),
        *(("bad_words", value) for value in ("", " ", (3,))),
        *(("stop_token_ids", value) for value in ((-1,), ("a",), tuple(range(MAX_STOP_IDS + 1)))),
        *(("allowed_token_ids", value) for value in ((), (-1,), (1.0,))),
        *(
            ("logit_bias", value)
            for value in ({-1: 0.0}, {1: math.inf}, {1: math.nan}, {"1": 0.0}, {1: "a"}, dict.fromkeys(range(513), 0.0))
        ),
    ],
)
def test_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_the_callers_dict_is_not_kept() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}


def test_unknown_fields_are_errors() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]


def test_single_texts_and_lists_are_accepted() -> None:
    params = SamplingParams(stop="a", bad_words=["b", "c"], stop_token_ids=[1], allowed_token_ids=[2])  # type: ignore[arg-type]
    assert params.stop == ("a",) and params.bad_words == ("b", "c")
    assert params.stop_token_ids == (1,) and params.allowed_token_ids == (2,)
    assert hash(params.stop_token_ids) is not None


@pytest.mark.parametrize(("fields", "needs"), [({}, False), (dict(stop="a"), True), (dict(logprobs=0), True)], ids=str)
def test_needs_every_token(fields: dict, needs: bool) -> None:
    assert SamplingParams(**fields).needs_every_token == needs

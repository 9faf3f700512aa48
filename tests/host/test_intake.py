"""What becomes a request, and what is refused before it can do harm (behaviours 26, 30)."""

import numpy as np
import pytest

from jaxkv.errors import RequestError
from jaxkv.intake import Intake
from jaxkv.request import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_IDS, Request, SamplingParams

INTAKE = Intake(vocab_size=100, eos_ids=(7, 9))


class Letters:
    """A token a letter: "a" is 10; the rest of what a tokenizer does is not asked for."""

    def encode_bad_word(self, text: str) -> list[tuple[int, ...]]:
        bare = tuple(ord(letter) - ord("a") + 10 for letter in text if letter.isalpha())
        return [bare, (50, *bare)]

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(chr(token - 10 + ord("a")) for token in ids)


WITH_TOKENIZER = Intake(vocab_size=100, eos_ids=(7,), tokenizer=Letters())  # type: ignore[arg-type]


def make(prompt=(1, 2), intake: Intake = INTAKE, **params) -> Request:
    return intake.make_request("r", prompt, SamplingParams(**params), seed=5)


def test_stop_ids() -> None:
    """The model's end ids and the user's; `ignore_eos` takes the model's away only."""
    assert make(stop_token_ids=(30, 9)).stop_ids == (7, 9, 30)
    assert make(stop_token_ids=(30, 9), ignore_eos=True).stop_ids == (9, 30)
    assert make(ignore_eos=True).stop_ids == ()


@pytest.mark.parametrize(("given", "resolved"), [(None, 5), (0, 0), (3, 3), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seed(given: int | None, resolved: int) -> None:
    assert make(seed=given).seed == resolved


def test_prompts_of_numpy_integers() -> None:
    prompt = make(np.array([3, 99], np.int64)).prompt_token_ids
    assert prompt == (3, 99) and all(type(token) is int for token in prompt)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (dict(prompt=(1, 100)), "prompt: token id 100 is outside the vocabulary of 100"),
        (dict(prompt=(-1,)), "prompt: token id -1"),
        (dict(prompt=(1.5,)), "prompt: token id 1.5 is not a whole number"),
        (dict(prompt=(True,)), "prompt: token id True is not a whole number"),
        (dict(prompt=("a",)), "prompt: token id 'a' is not a whole number"),
        (dict(stop_token_ids=(100,)), "stop_token_ids: token id 100"),
        (dict(allowed_token_ids=(4, 2**40)), "allowed_token_ids: token id 1099511627776"),
        (dict(logit_bias={100: 1.0}), "logit_bias: token id 100"),
        (dict(stop_token_ids=tuple(range(20, 20 + MAX_STOP_IDS))), f"are {MAX_STOP_IDS + 2} ids; the limit is 32"),
        (dict(stop="x"), "need a tokenizer"),
        (dict(bad_words="x"), "need a tokenizer"),
        (dict(bad_words="a" * (MAX_BAD_WORD_LEN + 1), intake=WITH_TOKENIZER), "'aaaaaaaaaaaaaaaaa' is 17 tokens"),
        (
            dict(bad_words=[chr(97 + n // 8) + chr(97 + n % 8) for n in range(33)], intake=WITH_TOKENIZER),
            f"66 token sequences; the limit is {MAX_BAD_WORDS}",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(what: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(**what)


def test_bad_words() -> None:
    """Each spelling once; a text without tokens forbids nothing, and does not hide the others."""
    assert make(bad_words=("-", "ab", "ab", "c"), intake=WITH_TOKENIZER).bad_words_ids == (
        (50,), (10, 11), (50, 10, 11), (12,), (50, 12),
    )  # fmt: skip


def test_something_is_left_to_score() -> None:
    assert make(prompt_logprobs=0, prompt_logprobs_from=1, max_tokens=0).params.prompt_logprobs_from == 1
    with pytest.raises(RequestError, match="prompt_logprobs_from=2 leaves nothing of a prompt of 2 tokens"):
        make(prompt_logprobs=0, prompt_logprobs_from=2)

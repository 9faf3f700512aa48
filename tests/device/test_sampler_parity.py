"""The sampler against Hugging Face's own logits processors, field by field and all together (behaviour 31)."""

import warnings

import jax
import numpy as np
import pytest

from jaxkv.device import sampler
from tests.device.sampling import Row, pack, row, softmax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers.generation.logits_process")
pytestmark = pytest.mark.parity

V = 90
LOGITS = (np.random.default_rng(5).standard_normal((4, V)) * 3).astype(np.float32)
PROMPT, OUTPUT = (3, 4, 5, 5), (6, 7, 60, 60)


@jax.jit
def adjusted(logits, params, position, counts, rows, recent, live):
    return sampler.adjust(logits, params, position, counts, rows, recent, live)


@jax.jit
def truncated(logits, params, position, counts, rows, recent, live):
    return sampler.truncate(sampler.adjust(logits, params, position, counts, rows, recent, live), params)


def theirs(processors: list) -> np.ndarray:
    ids = torch.tensor([PROMPT + OUTPUT] * len(LOGITS))
    scores = torch.tensor(LOGITS)
    for processor in processors:
        scores = processor(ids, scores)
    return scores.numpy()


def rows(**fields) -> list[Row]:
    return [row(prompt=PROMPT, output=OUTPUT, **fields) for _ in LOGITS]


ALLOWED = (1, 5, 31, 32, 60, 64, 89)
WARPERS = [
    (dict(temperature=0.4), lambda: [hf.TemperatureLogitsWarper(0.4)]),
    (dict(top_k=12), lambda: [hf.TopKLogitsWarper(12)]),
    (dict(top_k=500), lambda: [hf.TopKLogitsWarper(500)]),
    (dict(top_p=0.8), lambda: [hf.TopPLogitsWarper(0.8)]),
    (dict(top_p=0.999), lambda: [hf.TopPLogitsWarper(0.999)]),
    (dict(min_p=0.07), lambda: [hf.MinPLogitsWarper(0.07)]),
    (
        dict(temperature=1.6, top_k=30, top_p=0.85, min_p=0.03),
        lambda: [
            hf.TemperatureLogitsWarper(1.6), hf.TopKLogitsWarper(30), hf.TopPLogitsWarper(0.85),
            hf.MinPLogitsWarper(0.03),
        ],
    ),
]  # fmt: skip
PROCESSORS = [
    (dict(repetition_penalty=1.4), lambda: [hf.RepetitionPenaltyLogitsProcessor(1.4)]),
    (dict(repetition_penalty=0.6), lambda: [hf.RepetitionPenaltyLogitsProcessor(0.6)]),
    (dict(logit_bias={0: 3.5, 89: -4.25}), lambda: [hf.SequenceBiasLogitsProcessor({(0,): 3.5, (89,): -4.25})]),
    (
        dict(bad_words_ids=[(9,), (60, 61), (60, 60, 62), (7, 63)]),
        lambda: [hf.NoBadWordsLogitsProcessor([[9], [60, 61], [60, 60, 62], [7, 63]], eos_token_id=torch.tensor([88]))],
    ),
    (
        dict(stop_ids=(2, 88), min_tokens=5),
        lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, torch.tensor([2, 88]))],
    ),
    (
        dict(stop_ids=(2, 88), min_tokens=4),
        lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, torch.tensor([2, 88]))],
    ),
    (
        dict(allowed_token_ids=ALLOWED),
        lambda: [hf.SuppressTokensLogitsProcessor([t for t in range(V) if t not in ALLOWED])],
    ),
    (
        dict(
            allowed_token_ids=ALLOWED, bad_words_ids=[(60, 32)], stop_ids=(64,), min_tokens=9, logit_bias={31: -2.0},
            repetition_penalty=1.7,
        ),
        lambda: [
            hf.SuppressTokensLogitsProcessor([t for t in range(V) if t not in ALLOWED]),
            hf.NoBadWordsLogitsProcessor([[60, 32]], eos_token_id=torch.tensor([88])),
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, torch.tensor([64])),
            hf.SequenceBiasLogitsProcessor({(31,): -2.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.7),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "processors"), PROCESSORS, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_processors(fields: dict, processors) -> None:
    ours = np.asarray(adjusted(LOGITS, **pack(rows(**fields), V)))
    np.testing.assert_allclose(ours, theirs(processors()), rtol=1e-6)


@pytest.mark.parametrize(("fields", "processors"), WARPERS, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_warpers(fields: dict, processors) -> None:
    """The same tokens are left, with the same probabilities (logits differ by a constant)."""
    ours, other = np.asarray(truncated(LOGITS, **pack(rows(**fields), V))), theirs(processors())
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(other))
    np.testing.assert_allclose(softmax(ours), softmax(other), atol=1e-6)

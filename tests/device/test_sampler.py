"""Every sampling field changes the distribution as documented (behaviour 31): the tokens that are left and their
probabilities, against a sorted float64 reference, and what is really drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.device import sampler
from jaxkv.request import MAX_BAD_WORD_LEN, MAX_LOGPROBS
from tests.device.sampling import Row, adjusted, pack, probabilities, row, softmax

V, N = 75, 8  # not a multiple of 32; every call has N entries, so that each function compiles once
LOGITS = (np.random.default_rng(0).standard_normal((N, V)) * 3).astype(np.float32)


@jax.jit
def truncated(logits, params, position, counts, rows, recent, live):
    return sampler.truncate(sampler.adjust(logits, params, position, counts, rows, recent, live), params)


adjust, sample, logprobs_of = jax.jit(sampler.adjust), jax.jit(sampler.sample), jax.jit(sampler.logprobs_of)


def check(r: Row, logits: np.ndarray = LOGITS[0]) -> np.ndarray:
    """The distribution of `r` among other rows equals the reference; returns it."""
    others = [row(temperature=0), row(temperature=2.0, top_k=3, repetition_penalty=1.5)]
    batch = np.stack([logits, *LOGITS[1:]])
    kept = softmax(np.asarray(truncated(batch, **pack([r, *others], V, N)))[0])
    expected = probabilities(logits, r)
    np.testing.assert_array_equal(kept > 0, expected > 0)
    np.testing.assert_allclose(kept, expected, atol=2e-6, rtol=2e-5)
    return kept


FIELDS = [
    dict(),
    dict(temperature=0.3),
    dict(temperature=3.0),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=V),
    dict(top_k=10**12),
    dict(top_p=0.7),
    dict(top_p=1e-9),
    dict(top_p=1 - 1e-6),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(min_p=1e-30),
    dict(top_k=20, top_p=0.6, min_p=0.02, temperature=1.7),
    dict(top_k=5, top_p=0.99999),  # top-p counts what top-k left
    dict(repetition_penalty=1.8),
    dict(repetition_penalty=0.5),
    dict(frequency_penalty=0.7),
    dict(frequency_penalty=-1.3),
    dict(presence_penalty=1.1),
    dict(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.4, temperature=0.7, top_p=0.9),
    dict(logit_bias={0: 4.0, 31: -2.5, 32: 1.0, V - 1: 5.0}),
    dict(logit_bias={t: 0.1 * t for t in range(V)}),
    dict(allowed_token_ids=(0, 30, 31, 32, 33, 63, 64, V - 1)),
    dict(allowed_token_ids=(V - 1,), logit_bias={3: 50.0}),  # bias does not undo a mask
    dict(allowed_token_ids=tuple(range(0, V, 2)), top_k=4, repetition_penalty=1.5),
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: ",".join(f) or "plain")
def test_distribution(fields: dict) -> None:
    check(row(prompt=(4, 5, 5, 6), output=(5, 40, 40, 40, 74), **fields))


def test_draws_follow_the_distribution() -> None:
    """Total variation between 16,384 draws of each row (its seeds 0 ..) and what the reference says."""
    vocab, size, rounds = 13, 2048, 8
    logits = np.random.default_rng(3).standard_normal(vocab).astype(np.float32) * 2
    for fields in (dict(), dict(temperature=1.8, top_k=9, top_p=0.95), dict(min_p=0.1, frequency_penalty=0.4)):
        r = row(output=(4, 4, 7), **fields)
        args = pack([r], vocab)
        counts = args.pop("counts")
        many = jax.tree.map(lambda a: np.repeat(a, size, axis=0), args)
        found = np.zeros(vocab)
        for start in range(0, size * rounds, size):
            seeds = np.stack([np.zeros(size), start + np.arange(size)], axis=1).astype(np.uint32)
            many["params"] = dataclasses.replace(many["params"], seed=seeds)
            tokens = np.asarray(sample(np.tile(logits, (size, 1)), counts=counts, **many))
            found += np.bincount(tokens, minlength=vocab) / (size * rounds)
        expected = probabilities(logits, r)
        assert not found[expected == 0].any()
        assert np.abs(found - expected).sum() / 2 < 0.02  # the expectation for exact draws is 0.007


# --- corners ---------------------------------------------------------------------------------------------------------


def test_ties_at_the_threshold_are_all_kept() -> None:
    logits = np.zeros(V, np.float32)
    logits[[3, 9, 50]] = 2.0
    logits[60] = 4.0
    assert np.flatnonzero(check(row(top_k=2), logits)).tolist() == [3, 9, 50, 60]
    assert np.flatnonzero(check(row(min_p=1.0), np.zeros(V, np.float32))).tolist() == list(range(V))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((N, V), np.float32)
    logits[:, [20, 33]] = 1.0
    tokens = np.asarray(sample(logits, **pack([row(temperature=0)] * N, V)))
    assert tokens.tolist() == [20] * N


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1e-3, 1e6, 1e38, 1e300])
@pytest.mark.parametrize("fields", [dict(), dict(top_k=5, top_p=0.9, min_p=0.01)], ids=["plain", "cut"])
def test_extreme_temperature(temperature: float, fields: dict) -> None:
    """Tiny ones become greedy, huge ones uniform over what is left; never NaN."""
    check(row(temperature=temperature, allowed_token_ids=tuple(range(40)), **fields))


@pytest.mark.parametrize(
    "fields",
    [
        dict(logit_bias={5: 1e300}),
        dict(logit_bias={5: -1e300, 6: -1e300}),
        dict(repetition_penalty=1e-300),
        dict(repetition_penalty=1e300),
    ],
    ids=str,
)
def test_values_beyond_float32(fields: dict) -> None:
    """They count as the largest or smallest that float32 holds: probabilities stay probabilities."""
    r = row(prompt=(2, 3), temperature=0.5, top_k=10, top_p=0.95, **fields)
    kept = np.asarray(truncated(LOGITS, **pack([r], V, N)))[0]
    assert not np.isnan(kept).any() and kept.max() == 0
    if "logit_bias" in fields:
        assert (kept[5] == 0) == (fields["logit_bias"][5] > 0)


def test_masked_logits_of_the_model() -> None:
    """-inf in a row (a padded vocabulary) is never drawn, whatever the temperature and the cuts."""
    logits = np.full(V, -np.inf, np.float32)
    logits[[2, 60]] = 1.0, 0.5
    for fields in (dict(), dict(top_k=50), dict(top_p=0.999), dict(min_p=1e-20), dict(temperature=1e6)):
        assert np.flatnonzero(check(row(**fields), logits)).tolist() == [2, 60]


def test_penalties_on_negative_and_zero_logits() -> None:
    """Repetition multiplies where it would otherwise reward: -2 becomes -4, 2 becomes 1, 0 stays."""
    logits = np.zeros((N, V), np.float32)
    logits[:, :3] = -2.0, 2.0, 0.0
    r = row(prompt=(0, 1, 2), temperature=0, repetition_penalty=2.0)
    assert np.asarray(adjust(logits, **pack([r], V, N)))[0, :3].tolist() == [-4.0, 1.0, 0.0]


def test_frequency_and_presence_do_not_see_the_prompt() -> None:
    r = row(prompt=(1, 1, 2), output=(2,), temperature=0, frequency_penalty=1.0, presence_penalty=0.5)
    x = np.asarray(adjust(np.zeros((N, V), np.float32), **pack([r], V, N)))[0]
    assert x[:3].tolist() == [0.0, 0.0, -1.5]


# --- bad words and stop ids ------------------------------------------------------------------------------------------

LONG = tuple(range(10, 10 + MAX_BAD_WORD_LEN))


@pytest.mark.parametrize(
    ("output", "words", "forbidden"),
    [
        ((), [(7,)], [7]),
        ((7, 8), [(7,), (9,)], [7, 9]),
        ((), [(7, 8)], []),  # its first token is not out
        ((7,), [(7, 8)], [8]),
        ((7, 9), [(7, 8)], []),
        ((9, 7), [(7, 8), (9, 7, 5), (9, 5)], [5, 8]),
        ((7, 7), [(7, 7, 7), (6, 7, 7)], [7]),
        (LONG[:-1], [LONG], [LONG[-1]]),
        (LONG[1:-1], [LONG], []),
        ((3, *LONG[:-1]), [LONG], [LONG[-1]]),
        ((5, 1, 2), [(1, 2, 3)], [3]),
    ],
)
def test_bad_words(output, words, forbidden) -> None:
    """The token that would complete a word is impossible; the prompt (1, 2, 3) does not count as its beginning."""
    r = row(output=output, bad_words_ids=words, temperature=0)
    x = np.asarray(adjust(LOGITS, **pack([r, row(temperature=0)], V, N)))
    assert np.flatnonzero(np.isinf(x[0])).tolist() == forbidden
    np.testing.assert_array_equal(x[1:], LOGITS[1:])
    np.testing.assert_array_equal(x[0], adjusted(LOGITS[0], r).astype(np.float32))


@pytest.mark.parametrize("num_output", [0, 2, 3])
def test_min_tokens_masks_every_stop_id(num_output: int) -> None:
    stop_ids = tuple(range(0, 64, 2))  # MAX_STOP_IDS of them
    r = row(output=(1,) * num_output, stop_ids=stop_ids, min_tokens=3, temperature=0)
    x = np.asarray(adjust(LOGITS, **pack([r, row(temperature=0, stop_ids=stop_ids)], V, N)))
    assert np.flatnonzero(np.isinf(x[0])).tolist() == (list(stop_ids) if num_output < 3 else [])
    np.testing.assert_array_equal(x[1:], LOGITS[1:])


@pytest.mark.parametrize(
    "r",
    [
        row(allowed_token_ids=(9,), stop_ids=(9,), min_tokens=5),
        row(allowed_token_ids=(9,), bad_words_ids=[(9,)]),
        row(allowed_token_ids=(8, 9), bad_words_ids=[(8,)], stop_ids=(9,), min_tokens=5),
    ],
)
def test_a_mask_that_leaves_nothing_gives_way(r: Row) -> None:
    """What is allowed wins over `min_tokens` and bad words (behaviour 29): the token drawn is an allowed one."""
    assert set(np.flatnonzero(check(r))) <= set(r.params.allowed_token_ids or ())
    assert int(sample(LOGITS, **pack([r], V, N))[0]) == 9


@pytest.mark.parametrize(
    ("plain", "r"),
    [
        (True, row(temperature=0)),
        (True, row(temperature=0, top_k=3, top_p=0.5, min_p=0.1, stop_ids=(9,))),
        (True, row(temperature=0, stop_ids=(9,), output=(4, 4), min_tokens=2)),  # as many as that are there
        (False, row(temperature=0.1)),
        (False, row(temperature=0, allowed_token_ids=(9,))),
        (False, row(temperature=0, bad_words_ids=[(9,)])),
        (False, row(temperature=0, stop_ids=(9,), output=(4,), min_tokens=2)),
        (False, row(temperature=0, logit_bias={1: 1.0})),
        (False, row(temperature=0, repetition_penalty=2.0)),
        (False, row(temperature=0, presence_penalty=1.0)),
        (False, row(temperature=0, frequency_penalty=1.0)),
    ],
)
def test_rows_that_take_the_largest_logit(plain: bool, r: Row) -> None:
    args = pack([r], V)
    assert bool(sampler.is_plain(args["params"], args["position"])[0]) == plain


# --- rows do not touch each other ------------------------------------------------------------------------------------


def test_neighbours_change_nothing() -> None:
    """A greedy row and a plain sampled row give the same, bit for bit, next to rows that use every feature."""
    plain = [row(temperature=0), row(temperature=1.0, seed=5)]
    busy = row(
        output=(4, 4, 9), temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, presence_penalty=1.0,
        logit_bias={1: 9.0}, allowed_token_ids=(1, 5, 9), bad_words_ids=[(9, 5)], stop_ids=(1,), min_tokens=9,
    )  # fmt: skip
    for function in (adjust, truncated, sample):
        alone = np.asarray(function(LOGITS, **pack(plain, V, N)))[:2]
        np.testing.assert_array_equal(np.asarray(function(LOGITS, **pack([*plain, *[busy] * 6], V, N)))[:2], alone)


def test_rows_that_are_not_live_switch_nothing_on() -> None:
    busy = row(output=(4,), temperature=0.5, repetition_penalty=2.0, logit_bias={1: 9.0}, allowed_token_ids=(1,),
               bad_words_ids=[(9,)], stop_ids=(1,), min_tokens=9)  # fmt: skip
    args = pack([row(temperature=0), busy], V, N) | dict(live=np.arange(N) < 1)
    np.testing.assert_array_equal(np.asarray(adjust(LOGITS, **args)), LOGITS)
    assert np.asarray(sample(LOGITS, **args)).tolist() == LOGITS.argmax(axis=1).tolist()


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_raw_and_chosen_is_always_there() -> None:
    tokens = np.array([0, V - 1, *LOGITS[2:].argmin(axis=1)], np.int32)
    got = logprobs_of(LOGITS, tokens, np.arange(N) == 3)  # one row asks: all are computed
    expected = np.log(softmax(LOGITS))
    np.testing.assert_allclose(got.chosen, np.take_along_axis(expected, tokens[:, None], 1)[:, 0], atol=1e-5)
    order = np.argsort(-expected, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_logprobs_of_a_small_vocabulary() -> None:
    """Places that no token can fill hold -inf, which `outputs` leaves out."""
    got = logprobs_of(np.zeros((2, 5), np.float32), np.zeros(2, np.int32), np.ones(2, bool))
    assert got.top.shape == (2, MAX_LOGPROBS)
    np.testing.assert_allclose(np.asarray(got.top)[:, :5], np.log(0.2), atol=1e-6)
    assert np.isneginf(np.asarray(got.top)[:, 5:]).all()


def test_nobody_asks_for_logprobs() -> None:
    got = logprobs_of(LOGITS, np.zeros(N, np.int32), np.zeros(N, bool))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(got))


def test_push_recent() -> None:
    recent = jnp.arange(2 * MAX_BAD_WORD_LEN, dtype=jnp.int32).reshape(2, -1)
    pushed = np.asarray(sampler.push_recent(recent, jnp.array([70, 71], jnp.int32)))
    assert pushed[:, -2:].tolist() == [[15, 70], [31, 71]] and pushed[:, 0].tolist() == [1, 17]

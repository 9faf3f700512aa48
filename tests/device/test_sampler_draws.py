"""Which random numbers a draw uses: the seed, the child and the position decide, and nothing else (behaviour 32)."""

import jax
import numpy as np
import pytest

from jaxkv.device import sampler
from tests.device.sampling import Row, pack, row

V, N = 200, 8
LOGITS = np.zeros(V, np.float32)  # uniform: two draws agree by chance once in 200 times

sample = jax.jit(sampler.sample)


def draw(rows: list[Row], start: int = 0) -> list[int]:
    """The tokens that `rows` draw, standing from place `start` on among rows that draw with other seeds."""
    others = [row(seed=1000 + i, output=(5,) * i) for i in range(N - len(rows))]
    batch = [*others[:start], *rows, *others[start:]]
    tokens = np.asarray(sample(np.tile(LOGITS, (N, 1)), **pack(batch, V)))
    return tokens[start : start + len(rows)].tolist()


def sequence(seed: int, child: int = 0, length: int = N) -> list[int]:
    """The first draws of one sequence, all in one batch."""
    return draw([row(seed=seed, child=child, output=(0,) * i) for i in range(length)])


def test_a_draw_depends_on_nothing_else() -> None:
    """Row, batch and neighbours change; so do fields that leave the distribution alone."""
    expected = draw([row(seed=7, output=(1, 2))])
    for start in range(N):
        assert draw([row(seed=7, output=(1, 2))], start) == expected
    assert draw([row(seed=7, output=(8, 9), top_k=V, frequency_penalty=0.0, stop_ids=(3,))]) == expected
    assert draw([row(seed=7, prompt=(1, 2, 3, 4, 5))]) == expected  # position 5, however it came about


def test_draws_are_reproducible_and_differ_by_position() -> None:
    first = sequence(42)
    assert first == sequence(42)
    assert len({*first}) > 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 0), (2, 0)),
        ((1, 0), (1, 1)),
        ((1, 1), (2, 0)),  # not seed + child
        ((0, 1), (1, 0)),
        ((1, 0), (1 + 2**32, 0)),  # the high word counts
        ((2**63, 0), (0, 0)),
        ((2**64 - 1, 0), (2**32 - 1, 0)),
        ((2**32, 0), (1, 0)),  # high and low word are not the same
        ((5, 127), (5, 0)),
    ],
    ids=str,
)
def test_seeds_and_children_differ(one: tuple[int, int], other: tuple[int, int]) -> None:
    same = np.equal(sequence(*one), sequence(*other)).sum()
    assert same <= 2


def test_key_is_the_documented_one() -> None:
    """`fold_in(fold_in(key(seed), child), position)`: what the docstring promises to whoever reproduces a draw."""
    seed, child, position = 123456789, 3, 17
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), child), position)
    noise = np.asarray(jax.random.gumbel(key, (V,), np.float32))
    assert draw([row(seed=seed, child=child, output=(0,) * 14)]) == [int((LOGITS + noise).argmax())]


@pytest.mark.parametrize("field", [dict(temperature=0.7), dict(top_k=50), dict(min_p=0.9)], ids=str)
def test_drawn_tokens_are_spread_evenly(field: dict) -> None:
    """Over many positions of one seed every token comes up about as often: chi-square within 5 sigma."""
    draws = 25
    counts = np.zeros(V)
    for start in range(draws):
        tokens = draw([row(seed=9, output=(0,) * (start * N + i), **field) for i in range(N)])
        counts += np.bincount(tokens, minlength=V)
    expected = draws * N / V
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - (V - 1)) < 5 * np.sqrt(2 * (V - 1))

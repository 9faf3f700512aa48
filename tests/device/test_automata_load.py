"""A grammar comes into the pools piece by piece: everything of it, and nothing beside it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config import GrammarSizes
from jaxkv.device import automata
from jaxkv.grammar_layout import STATE_COLUMNS, GrammarLoad, GrammarPlace

SIZES = GrammarSizes(num_grammars=3, num_states=4000, num_transitions=200_000, num_lookups=9000, num_masks=100)
MAX_ROWS = 4


def grammar(vocab_size: int, *, states: int, cells: int, lookups: int, masks: int) -> GrammarLoad:
    rng = np.random.default_rng(0)
    return GrammarLoad(
        place=GrammarPlace(states=777, transitions=501, classes=2), first_lookup=333, first_mask=17,
        states=rng.integers(1, 1 << 20, (states, STATE_COLUMNS), np.int32),
        transitions=rng.integers(1, 1 << 16, cells, np.uint16), effects=rng.integers(1, 1 << 15, cells, np.int16),
        lookups=rng.integers(1, 1 << 20, lookups, np.int32), class_of=rng.integers(1, 99, vocab_size, np.uint16),
        masks=rng.integers(1, 1 << 32, (masks, -(-vocab_size // 32)), np.uint32),
    )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [33, 104, 4097])
@pytest.mark.parametrize(
    ("states", "cells", "lookups", "masks"),
    [
        (3, 5, 7, 2),
        (2500, 70, 60, 1),  # the longest table is one of each
        (5, 140_000, 10, 1),
        (5, 10, 8200, 33),
        (automata.LOADED_STATES, automata.LOADED_TRANSITIONS, automata.LOADED_LOOKUPS, automata.LOADED_MASKS),
        (1, 1, 1, 70),
    ],
)
def test_all_pieces_of_a_grammar(vocab_size: int, states: int, cells: int, lookups: int, masks: int) -> None:
    load = grammar(vocab_size, states=states, cells=cells, lookups=lookups, masks=masks)
    tables = automata.init_tables(SIZES, MAX_ROWS, vocab_size)
    expected = {field.name: np.array(getattr(tables, field.name)) for field in dataclasses.fields(tables)}
    expected["states"].reshape(-1, STATE_COLUMNS)[777 : 777 + states] = load.states
    expected["transitions"][501 : 501 + cells] = load.transitions
    expected["effects"][501 : 501 + cells] = load.effects
    expected["lookups"][333 : 333 + lookups] = load.lookups
    expected["classes"][2] = load.class_of
    expected["masks"][17 : 17 + masks, : load.masks.shape[1]] = load.masks
    for piece in automata.pieces(load):
        tables = automata.load(tables, piece)
    for name, table in expected.items():
        np.testing.assert_array_equal(np.asarray(getattr(tables, name)), table, err_msg=name)


@pytest.mark.parametrize("vocab_size", [33, 4096, 4097])
def test_masks_are_read_up_to_the_vocabulary(vocab_size: int) -> None:
    assert automata.mask_width(vocab_size) % 128 == 0
    bits = np.random.default_rng(1).integers(0, 2, (3, 32 * automata.mask_width(vocab_size)), np.uint32)
    words = (bits.reshape(3, -1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    np.testing.assert_array_equal(automata.unpack(jnp.asarray(words), vocab_size), bits[:, :vocab_size] != 0)

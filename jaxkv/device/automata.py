"""Grammars on the device: tables of token automata in fixed pools, masks from them, and the step from state to state.

All grammars lie in the same few arrays, allocated once, so that a new one is a write and never a new program. A row names
its grammar by offsets (`grammar_layout.GrammarPlace`) and carries its state; free rows have offset 0.

A *host row* has a grammar that is matched on the host. It stands in one of the first states, one for each row, whose mask
the host writes before each step (`set_masks`).

Axis letters: N sampled rows, V vocabulary, W words of a mask, S states, C token classes of a grammar.

On TPUs an array lies in memory in the order of axes that its tiles of 8 x 128 pad least, and a gather of rows from one
that lies column by column first copies it whole, at each call of a step. So masks are as wide as fills tiles, and states
lie one after the other along one axis.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import GrammarSizes
from jaxkv.device.row_state import NO_TOKEN, RowParams
from jaxkv.grammar_layout import (
    AS_MASKED,
    DIST,
    FIRST,
    MASK,
    MAX_CLASSES,
    MAY,
    SLACK,
    STATE_COLUMNS,
    STOPS,
    GrammarLoad,
)

# Entries that one call of `load` writes at most; a grammar takes as many calls as its longest table needs.
LOADED_STATES, LOADED_TRANSITIONS, LOADED_LOOKUPS, LOADED_MASKS = 1024, 1 << 16, 4096, 32
NEG_INF = float("-inf")
_LANES = 128  # columns of a tile of a TPU's memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """The pools. Each ends with as much slack as `load` writes at once."""

    states: jax.Array  # int32 [S * STATE_COLUMNS]: one after the other, see `_column`
    transitions: jax.Array  # uint16 [.]: entry `FIRST + class`, with FIRST of the state, is the state that follows
    effects: jax.Array  # int16 [.]: on the counter, at the same places: >= 0 adds, < 0 sets to the complement
    lookups: jax.Array  # int32 [.]: mask rows and distances, see `address`
    classes: jax.Array  # uint16 [G, V]: of each token
    masks: jax.Array  # uint32 [M, W]: bit (token % 32) of word (token // 32)


def mask_width(vocab_size: int) -> int:
    """W: ceil(V / 32), rounded up to whole tiles."""
    return -(-vocab_size // (32 * _LANES)) * _LANES


def init_tables(sizes: GrammarSizes, max_rows: int, vocab_size: int) -> Tables:
    """Empty pools with the states and masks of host rows, which follow those of no grammar."""
    num_host = max_rows + 1
    states = np.zeros((num_host, STATE_COLUMNS), np.int32)
    states[:, MASK] = np.arange(num_host)  # of their entries in `lookups`
    states[:, STOPS] = AS_MASKED
    num_transitions = 1 + sizes.num_transitions + LOADED_TRANSITIONS
    num_lookups = sizes.num_lookups + LOADED_LOOKUPS
    rest = jnp.zeros((sizes.num_states + LOADED_STATES) * STATE_COLUMNS, jnp.int32)
    return Tables(
        states=jnp.concatenate([jnp.asarray(states.ravel()), rest]),
        transitions=jnp.zeros(num_transitions, jnp.uint16),
        effects=jnp.zeros(num_transitions, jnp.int16),
        lookups=jnp.concatenate([jnp.arange(num_host, dtype=jnp.int32), jnp.zeros(num_lookups, jnp.int32)]),
        classes=jnp.zeros((1 + sizes.num_grammars, vocab_size), jnp.uint16),
        masks=jnp.zeros((num_host + sizes.num_masks + LOADED_MASKS, mask_width(vocab_size)), jnp.uint32),
    )


def constrain(
    logits: jax.Array,  # float32 [N, V]
    params: RowParams,  # of the N rows
    grammar_state: jax.Array,  # int32 [N]
    grammar_count: jax.Array,  # int32 [N]
    position: jax.Array,  # int32 [N]: position the sampled token will have
    tables: Tables,
    live: jax.Array,  # bool [N]
) -> jax.Array:
    """-inf where the rows' grammars, or their budgets of tokens, forbid a token; something is always left."""
    bound = live & (params.grammar_states != 0)

    def apply(logits: jax.Array) -> jax.Array:
        state = params.grammar_states + grammar_state
        mask = tables.lookups[address(tables, state, MASK, grammar_count)]
        bits = unpack(tables.masks[mask], logits.shape[1])
        masked = jnp.where(bits | ~bound[:, None], logits, NEG_INF)
        remaining = params.max_total_len - 1 - position  # tokens that may follow the sampled one
        tight = bound & (_column(tables, state, SLACK) > remaining)
        masked = jax.lax.cond(
            tight.any(),
            lambda x: fit_budget(x, params, grammar_state, grammar_count, remaining, tables, tight),
            lambda x: x,
            masked,
        )
        return _allow_stops(masked, logits, params.stop_ids, _column(tables, state, STOPS), bound)

    return jax.lax.cond(bound.any(), apply, lambda x: x, logits)


def _column(tables: Tables, states: jax.Array, column: int) -> jax.Array:
    """int32 [N]: one of the STATE_COLUMNS numbers of each of `states` int32 [N], counted from the first in the pool."""
    return tables.states[states * STATE_COLUMNS + column]


def unpack(words: jax.Array, vocab_size: int) -> jax.Array:
    """bool [N, V] from uint32 [N, W]; shifts only: a gather of `V` words a row is slow on TPUs."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def address(tables: Tables, states: jax.Array, first: int, count: jax.Array) -> jax.Array:
    """int32 [N]: where a number that depends on state and counter stands in `lookups`.

    `base + clip(count - low_a, 0, len_a) + clip(count - low_b, 0, len_b)`: it changes only near the least and the most
    count of a string.

    Args:
        states: int32 [N], as of `_column`.
        first: MASK or DIST, the first of the five columns.
        count: int32 [N].
    """
    base, low_a, len_a, low_b, len_b = (_column(tables, states, first + i) for i in range(5))
    return base + jnp.clip(count - low_a, 0, len_a) + jnp.clip(count - low_b, 0, len_b)


def fit_budget(
    logits: jax.Array,
    params: RowParams,
    grammar_state: jax.Array,
    grammar_count: jax.Array,
    remaining: jax.Array,  # int32 [N]
    tables: Tables,
    tight: jax.Array,  # bool [N]
) -> jax.Array:
    """-inf for tokens of tight rows after which the rest of the output would not fit into `remaining` tokens.

    It is rare (only near the end of a row's budget), so a gather of `V` entries a row, one row at a time, is no harm.
    """

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        logits, classes, at, states, count, remaining, tight = row

        def cut(x: jax.Array) -> jax.Array:
            # By class, with what lies in the pool beyond the state's own, whose classes the mask forbids; then by token.
            follow = jax.lax.dynamic_slice_in_dim(tables.transitions, at, MAX_CLASSES).astype(jnp.int32)
            counts = _count_on(jax.lax.dynamic_slice_in_dim(tables.effects, at, MAX_CLASSES), count)
            dist = tables.lookups[address(tables, states + follow, DIST, counts)]
            return jnp.where((dist <= remaining)[tables.classes[classes].astype(jnp.int32)], x, NEG_INF)

        return jax.lax.cond(tight, cut, lambda x: x, logits)

    first = _column(tables, params.grammar_states + grammar_state, FIRST)
    at = params.grammar_transitions + first
    rows = (logits, params.grammar_classes, at, params.grammar_states, grammar_count, remaining, tight)
    return jax.lax.map(one_row, rows)


def _count_on(effect: jax.Array, count: jax.Array) -> jax.Array:
    effect = effect.astype(jnp.int32)
    return jnp.where(effect >= 0, count + effect, ~effect)


def _allow_stops(
    masked: jax.Array, logits: jax.Array, stop_ids: jax.Array, stops: jax.Array, bound: jax.Array
) -> jax.Array:
    """Stop ids exactly where the output may end (behaviour 29); rows that are not bound stay as they are."""
    rows = jnp.arange(logits.shape[0])[:, None]
    set_ = bound & (stops != AS_MASKED)
    ids = jnp.where(set_[:, None], stop_ids, NO_TOKEN)
    free = logits.at[rows, ids].get(mode="fill", fill_value=NEG_INF)
    return masked.at[rows, ids].set(jnp.where((stops == MAY)[:, None], free, NEG_INF), mode="drop")


def advance(
    token_ids: jax.Array, params: RowParams, grammar_state: jax.Array, grammar_count: jax.Array, tables: Tables
) -> tuple[jax.Array, jax.Array]:
    """States and counters int32 [N] after `token_ids` int32 [N]; free rows and host rows stay at 0."""
    kind = tables.classes[params.grammar_classes, token_ids].astype(jnp.int32)
    first = _column(tables, params.grammar_states + grammar_state, FIRST)
    at = params.grammar_transitions + first + kind
    # Class 0 is of tokens that no state allows, stop ids among them: they have no transitions.
    after = jnp.where(kind == 0, 0, tables.transitions[at].astype(jnp.int32))
    return after, _count_on(tables.effects[at], grammar_count)


def set_masks(tables: Tables, rows: jax.Array, masks: jax.Array) -> Tables:
    """Writes the masks of host rows: `rows` int32 [B] (-1 is padding, whose mask 0 nobody reads), uint32 [B, W]."""
    return dataclasses.replace(tables, masks=tables.masks.at[rows + 1].set(masks))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Piece:
    """As much of a grammar as `load` writes at once; entries beyond a count stay as they are."""

    starts: np.ndarray  # int32 [4]: first entry to write of states, transitions, lookups and masks
    counts: np.ndarray  # int32 [4]
    class_row: np.ndarray  # int32 []
    states: np.ndarray  # int32 [LOADED_STATES * STATE_COLUMNS]
    transitions: np.ndarray  # uint16 [LOADED_TRANSITIONS]
    effects: np.ndarray  # int16 [LOADED_TRANSITIONS]
    lookups: np.ndarray  # int32 [LOADED_LOOKUPS]
    class_of: np.ndarray  # uint16 [V]
    masks: np.ndarray  # uint32 [LOADED_MASKS, W]


def load(tables: Tables, piece: Piece) -> Tables:
    """Writes a piece of a grammar."""

    def write(name: str, which: int) -> jax.Array:
        new = jnp.asarray(getattr(piece, name))
        return _write(getattr(tables, name), new, piece.starts[which], piece.counts[which])  # pyright: ignore

    return Tables(
        states=write("states", 0),
        transitions=write("transitions", 1),
        effects=write("effects", 1),
        lookups=write("lookups", 2),
        masks=write("masks", 3),
        classes=tables.classes.at[piece.class_row].set(jnp.asarray(piece.class_of)),
    )


def _write(pool: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """`pool` with the first `count` entries of `new` from `start` on; the slack at its end keeps the slice in place."""
    old = jax.lax.dynamic_slice_in_dim(pool, start, new.shape[0])
    keep = (jnp.arange(new.shape[0]) < count).reshape(-1, *[1] * (new.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(pool, jnp.where(keep, new, old), start, 0)


def pieces(load: GrammarLoad) -> list[Piece]:
    """A grammar in pieces of one shape, padded."""
    sizes = LOADED_STATES * STATE_COLUMNS, LOADED_TRANSITIONS, LOADED_LOOKUPS, LOADED_MASKS
    lengths = load.states.size, len(load.transitions), len(load.lookups), len(load.masks)
    first = load.place.states * STATE_COLUMNS, load.place.transitions, load.first_lookup, load.first_mask

    def make(index: int) -> Piece:
        done = np.minimum(index * np.array(sizes), lengths)
        counts = np.minimum(np.array(lengths) - done, sizes)
        piece = nothing(len(load.class_of))

        def fill(padded: np.ndarray, table: np.ndarray, which: int) -> None:
            part = table[done[which] : done[which] + counts[which]]
            padded[tuple(map(slice, part.shape))] = part  # masks are padded to W words too

        fill(piece.states, load.states.ravel(), 0)
        fill(piece.transitions, load.transitions, 1)
        fill(piece.effects, load.effects, 1)
        fill(piece.lookups, load.lookups, 2)
        fill(piece.masks, load.masks, 3)
        return dataclasses.replace(
            piece,
            starts=(first + done).astype(np.int32),
            counts=counts.astype(np.int32),
            class_row=np.array(load.place.classes, np.int32),
            class_of=load.class_of,
        )

    return [make(index) for index in range(max(-(-n // size) for n, size in zip(lengths, sizes, strict=True)))]


def nothing(vocab_size: int) -> Piece:
    """A piece that changes nothing; for warm-up."""
    return Piece(
        starts=np.zeros(4, np.int32),
        counts=np.zeros(4, np.int32),
        class_row=np.array(0, np.int32),
        states=np.zeros(LOADED_STATES * STATE_COLUMNS, np.int32),
        transitions=np.zeros(LOADED_TRANSITIONS, np.uint16),
        effects=np.zeros(LOADED_TRANSITIONS, np.int16),
        lookups=np.zeros(LOADED_LOOKUPS, np.int32),
        class_of=np.zeros(vocab_size, np.uint16),
        masks=np.zeros((LOADED_MASKS, mask_width(vocab_size)), np.uint32),
    )

"""Grammars on the device: tables of token automata in fixed pools, masks from them, and the step from state to state.

All grammars lie in the same few arrays, allocated once, so that a new one is a write and never a new program. A row names
its grammar by offsets (`plan.GrammarPlace`) and carries its state; free rows have offset 0, whose state allows everything.

A *host row* has a grammar that is matched on the host. It stands in one of the first states, one for each row, whose mask
the host writes before each step (`set_masks`).

Axis letters: N sampled rows, V vocabulary, W = ceil(V / 32) words of a mask, S states, C token classes of a grammar.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import GrammarSizes
from jaxkv.plan import GrammarLoad
from jaxkv.row_state import NO_TOKEN, RowParams

# Columns of a state.
MASK = 0  # row of its mask
STOPS = 1  # what becomes of stop ids, below
DIST = 2  # fewest tokens from here to where the output may end
WORST = 3  # most tokens that any token allowed here leaves to go: with this many left, every allowed one fits
STATE_COLUMNS = 4

NEVER, MAY, AS_MASKED = range(3)  # stop ids are forbidden, allowed, or as the mask has them

# Entries that one call of `load` writes at most; a grammar takes as many calls as its longest table needs.
LOADED_STATES, LOADED_TRANSITIONS, LOADED_MASKS = 1024, 1 << 16, 32
NEG_INF = float("-inf")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """The pools. Each ends with as much slack as `load` writes at once."""

    states: jax.Array  # int32 [S, STATE_COLUMNS]
    transitions: jax.Array  # uint16 [.]: entry `state * num_classes + class` of a grammar is the state that follows
    classes: jax.Array  # uint16 [G, V]: of each token
    masks: jax.Array  # uint32 [M, W]: bit (token % 32) of word (token // 32)


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def init_tables(sizes: GrammarSizes, max_rows: int, vocab_size: int) -> Tables:
    """Empty pools with the states and masks of host rows, which follow those of no grammar."""
    num_host = max_rows + 1
    states = np.zeros((num_host, STATE_COLUMNS), np.int32)
    states[:, MASK] = np.arange(num_host)
    states[:, STOPS] = AS_MASKED
    rest = jnp.zeros((sizes.num_states + LOADED_STATES, STATE_COLUMNS), jnp.int32)
    return Tables(
        states=jnp.concatenate([jnp.asarray(states), rest]),
        transitions=jnp.zeros(1 + sizes.num_transitions + LOADED_TRANSITIONS, jnp.uint16),
        classes=jnp.zeros((1 + sizes.num_grammars, vocab_size), jnp.uint16),
        masks=jnp.zeros((num_host + sizes.num_masks + LOADED_MASKS, num_words(vocab_size)), jnp.uint32),
    )


def constrain(
    logits: jax.Array,  # float32 [N, V]
    params: RowParams,  # of the N rows
    grammar_state: jax.Array,  # int32 [N]
    position: jax.Array,  # int32 [N]: position the sampled token will have
    tables: Tables,
    live: jax.Array,  # bool [N]
) -> jax.Array:
    """-inf where the rows' grammars, or their budgets of tokens, forbid a token; something is always left."""
    bound = live & (params.grammar_states != 0)

    def apply(logits: jax.Array) -> jax.Array:
        state = tables.states[params.grammar_states + grammar_state]
        bits = unpack(tables.masks[state[:, MASK]], logits.shape[1])
        masked = jnp.where(bits | ~bound[:, None], logits, NEG_INF)
        remaining = params.max_total_len - 1 - position  # tokens that may follow the sampled one
        tight = bound & (state[:, WORST] > remaining)
        masked = jax.lax.cond(
            tight.any(), lambda x: fit_budget(x, params, grammar_state, remaining, tables, tight), lambda x: x, masked
        )
        return _allow_stops(masked, logits, params.stop_ids, state[:, STOPS], bound)

    return jax.lax.cond(bound.any(), apply, lambda x: x, logits)


def unpack(words: jax.Array, vocab_size: int) -> jax.Array:
    """bool [N, V] from uint32 [N, W]; shifts only: a gather of `V` words a row is slow on TPUs."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def fit_budget(
    logits: jax.Array,
    params: RowParams,
    grammar_state: jax.Array,
    remaining: jax.Array,  # int32 [N]
    tables: Tables,
    tight: jax.Array,  # bool [N]
) -> jax.Array:
    """-inf for tokens of tight rows after which the rest of the output would not fit into `remaining` tokens.

    Rare (only near the end of a row's budget), so that a gather of `V` entries a row, one row at a time, is no harm.
    """

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        logits, classes, transition, states, remaining, tight = row

        def cut(x: jax.Array) -> jax.Array:
            follow = tables.transitions[transition + tables.classes[classes].astype(jnp.int32)]
            dist = tables.states[:, DIST][states + follow.astype(jnp.int32)]
            return jnp.where(dist <= remaining, x, NEG_INF)

        return jax.lax.cond(tight, cut, lambda x: x, logits)

    transition = params.grammar_transitions + grammar_state * params.grammar_num_classes
    return jax.lax.map(
        one_row, (logits, params.grammar_classes, transition, params.grammar_states, remaining, tight)
    )


def _allow_stops(
    masked: jax.Array, logits: jax.Array, stop_ids: jax.Array, stops: jax.Array, bound: jax.Array
) -> jax.Array:
    """Stop ids exactly where the output may end (behaviour 29); rows that are not bound stay as they are."""
    rows = jnp.arange(logits.shape[0])[:, None]
    set_ = bound & (stops != AS_MASKED)
    ids = jnp.where(set_[:, None], stop_ids, NO_TOKEN)
    free = logits.at[rows, ids].get(mode="fill", fill_value=NEG_INF)
    return masked.at[rows, ids].set(jnp.where((stops == MAY)[:, None], free, NEG_INF), mode="drop")


def advance(token_ids: jax.Array, params: RowParams, grammar_state: jax.Array, tables: Tables) -> jax.Array:
    """int32 [N]: states after `token_ids` int32 [N]; rows without a grammar, and host rows, stay in state 0."""
    kind = tables.classes[params.grammar_classes, token_ids].astype(jnp.int32)
    at = params.grammar_transitions + grammar_state * params.grammar_num_classes + kind
    return tables.transitions[at].astype(jnp.int32)


def set_masks(tables: Tables, rows: jax.Array, masks: jax.Array) -> Tables:
    """Writes the masks of host rows: `rows` int32 [B] (-1 is padding, whose mask 0 nobody reads), uint32 [B, W]."""
    return dataclasses.replace(tables, masks=tables.masks.at[rows + 1].set(masks))


def host_row_state(row: int) -> int:
    """The state in which a host row stands."""
    return row + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Piece:
    """As much of a grammar as `load` writes at once; entries beyond a count stay as they are."""

    starts: np.ndarray  # int32 [3]: first state, transition and mask to write
    counts: np.ndarray  # int32 [3]
    class_row: np.ndarray  # int32 []
    states: np.ndarray  # int32 [LOADED_STATES, STATE_COLUMNS]
    transitions: np.ndarray  # uint16 [LOADED_TRANSITIONS]
    class_of: np.ndarray  # uint16 [V]
    masks: np.ndarray  # uint32 [LOADED_MASKS, W]


def load(tables: Tables, piece: Piece) -> Tables:
    """Writes a piece of a grammar."""
    parts = (tables.states, piece.states), (tables.transitions, piece.transitions), (tables.masks, piece.masks)
    states, transitions, masks = (
        _write(pool, jnp.asarray(new), piece.starts[i], piece.counts[i]) for i, (pool, new) in enumerate(parts)
    )
    classes = tables.classes.at[piece.class_row].set(jnp.asarray(piece.class_of))
    return Tables(states=states, transitions=transitions, classes=classes, masks=masks)


def _write(pool: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """`pool` with the first `count` entries of `new` from `start` on; the slack at its end keeps the slice in place."""
    old = jax.lax.dynamic_slice_in_dim(pool, start, new.shape[0])
    keep = (jnp.arange(new.shape[0]) < count).reshape(-1, *[1] * (new.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(pool, jnp.where(keep, new, old), start, 0)


def pieces(load: GrammarLoad) -> list[Piece]:
    """A grammar in pieces of one shape, padded."""
    tables = (load.states, LOADED_STATES), (load.transitions, LOADED_TRANSITIONS), (load.masks, LOADED_MASKS)
    first = np.array([load.place.states, load.place.transitions, load.first_mask], np.int32)
    num_pieces = max(-(-len(table) // size) for table, size in tables)
    out = []
    for index in range(num_pieces):
        parts = [table[index * size : (index + 1) * size] for table, size in tables]
        done = np.array([min(index * size, len(table)) for table, size in tables], np.int32)
        padded = [
            np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])
            for part, (_, size) in zip(parts, tables, strict=True)
        ]
        out.append(
            Piece(
                starts=first + done,
                counts=np.array([len(part) for part in parts], np.int32),
                class_row=np.int32(load.place.classes),  # pyright: ignore[reportArgumentType]
                states=padded[0],
                transitions=padded[1],
                class_of=load.class_of,
                masks=padded[2],
            )
        )
    return out


def nothing(vocab_size: int) -> Piece:
    """A piece that changes nothing; for warm-up."""
    return Piece(
        starts=np.zeros(3, np.int32),
        counts=np.zeros(3, np.int32),
        class_row=np.int32(0),  # pyright: ignore[reportArgumentType]
        states=np.zeros((LOADED_STATES, STATE_COLUMNS), np.int32),
        transitions=np.zeros(LOADED_TRANSITIONS, np.uint16),
        class_of=np.zeros(vocab_size, np.uint16),
        masks=np.zeros((LOADED_MASKS, num_words(vocab_size)), np.uint32),
    )

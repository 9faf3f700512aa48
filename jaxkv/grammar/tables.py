"""Token tables: what a model's tokens do to a byte automaton, in the form that the device reads.

A row's whole state is two numbers, `state` and `counter`:

    mask     masks[mask_of[address(mask_windows, state, counter)]]
    step     k = class_of[token]; state, counter = next[state, k], effect(count[state, k], counter)
    effect   count >= 0 adds, count < 0 sets to ~count
    distance dist_of[address(dist_windows, state, counter)]

with `address` of `windows`; the device has the rows of `next` and `count` as `packing` says. A token that the mask
forbids has the next state 0, which is dead. The end ids are in the masks of states where the text is complete, but in
no class: nothing comes after them.
"""

import dataclasses
import functools

import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.classes import Transitions, transitions
from jaxkv.grammar.distances import UNREACHABLE, Distances, Moves, distances, find_moves, reachable
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.forced import force
from jaxkv.grammar.masks import Masks, state_masks
from jaxkv.grammar.packing import PackedRows, pack_rows
from jaxkv.grammar.rows import token_rows
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.windows import BASE, LEN_A, LEN_B, address

HOST_ONLY = ("next", "count", "byte_state", "forced")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableBudget:
    """Limits of one grammar's token tables; what exceeds them is served by a host matcher.

    Args:
        max_bytes: of the tables on the device.
        max_work: branches of the walk over the vocabulary; 20 million take some 2 s.
    """

    max_bytes: int = 64 << 20
    max_work: int = 30_000_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenTables:
    """One grammar for one vocabulary. State 0 is dead.

    Attributes:
        vocab_size: V, the width of the logits.
        start: the state before the first token; the counter is 0 then.
        class_of: uint16 [V], class of each token; 0 for tokens that are never allowed, the end ids among them.
        next: uint16 [S, K], state after a token of a class.
        count: int16 [S, K], what it does to the counter; None if nothing is counted.
        mask_windows: int32 [S, 5], mask_of: int32 [..], masks: uint32 [M, ceil(V / 32)]: see `masks.Masks`.
        accepting: bool [S], the text may end here.
        dist_windows: int32 [S, 5], dist_of: int32 [..]: fewest tokens to a complete text, the end token not counted.
        slack: int32 [S], the greatest distance after any token that is allowed, 0 if none is. A row with
            `tokens that remain > slack[state]` needs no mask for its budget.
        byte_state: int32 [S], the state of the byte automaton.
        end_ids: that the masks contain.
        forced: int32 [S], the only token a state allows, where the model's tokenizer leaves no doubt about it (`forced`);
            -1 elsewhere.
    """

    vocab_size: int
    start: int
    class_of: np.ndarray
    next: np.ndarray
    count: np.ndarray | None
    mask_windows: np.ndarray
    mask_of: np.ndarray
    masks: np.ndarray
    accepting: np.ndarray
    dist_windows: np.ndarray
    dist_of: np.ndarray
    slack: np.ndarray
    byte_state: np.ndarray
    end_ids: tuple[int, ...]
    forced: np.ndarray

    @property
    def num_states(self) -> int:
        """With the dead one."""
        return len(self.next)

    @property
    def nbytes(self) -> int:
        """Of what the device holds."""
        arrays = [getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in HOST_ONLY]
        return self.packed.nbytes + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    @functools.cached_property
    def packed(self) -> PackedRows:
        """`next` and `count` as the device has them."""
        return pack_rows(self.next, self.count)

    @property
    def min_tokens(self) -> int:
        """Fewest tokens of a complete text, the end token not counted."""
        return int(self.dist_of[address(self.dist_windows, self.start, 0)])


def build_tables(
    automaton: ByteAutomaton,
    vocabulary: TokenVocabulary,
    budget: TableBudget | None = None,
    *,
    canonical: bool = False,
) -> TokenTables:
    """Compiles an automaton for a vocabulary.

    Args:
        automaton: the texts.
        vocabulary: the tokens.
        budget: what the tables may cost.
        canonical: where the grammar leaves one text, only the tokens the model's tokenizer has for it are allowed, as
            `forced` has it. The texts are the same.

    Raises:
        TooLarge: the tables exceed the budget, or the vocabulary lacks single bytes that a counted string needs.
        RequestError: no text of the language can be written with these tokens.
    """
    budget = budget or TableBudget()
    if automaton.counters is not None:
        assert not np.any(automaton.accepting & (automaton.counters.region != 0)), "a text ends inside a counted string"
    barred = np.zeros(automaton.num_states, bool)
    while True:
        rows = token_rows(automaton, vocabulary, barred=barred, max_work=budget.max_work)
        forced = np.full(automaton.num_states, -1, np.int32)
        if canonical:
            rows, forced = force(automaton, rows, vocabulary)
        table = transitions(automaton, rows, vocabulary, budget.max_bytes)
        moves = find_moves(automaton, rows, table)
        reached = reachable(moves, automaton.start, automaton.num_states)
        dist = distances(automaton, moves, budget.max_work)
        lowest, highest = _extremes(dist)
        stuck = reached & (lowest == UNREACHABLE)
        if stuck[automaton.start] or automaton.is_empty:
            raise RequestError("no text that the grammar allows can be written with the tokens of this model")
        if not stuck.any():
            break
        # A vocabulary without all single bytes: no token may end where none of its tokens goes on.
        barred |= stuck
    if np.any(reached & (highest == UNREACHABLE)):
        raise TooLarge("with these tokens a counted string cannot be completed from every length; use the host matcher")
    masks = state_masks(automaton, rows, table, vocabulary, reached, budget.max_bytes)
    return _assemble(automaton, vocabulary, table, moves, masks, dist, reached, forced, budget)


def _assemble(
    automaton: ByteAutomaton,
    vocabulary: TokenVocabulary,
    table: Transitions,
    moves: Moves,
    masks: Masks,
    dist: Distances,
    reached: np.ndarray,
    forced: np.ndarray,
    budget: TableBudget,
) -> TokenTables:
    """Leaves out states where no token ends, and numbers the others anew."""
    reached[0] = True
    old = np.flatnonzero(reached)
    if len(old) > 1 << 16:
        raise TooLarge(f"{len(old)} states are more than 65536; the host matcher serves such a grammar")
    number = np.zeros(automaton.num_states, np.int64)
    number[old] = np.arange(len(old))
    farthest = np.zeros(automaton.num_states, np.int32)
    np.maximum.at(farthest, moves.source, _extremes(dist)[1][moves.target])
    mask_windows, mask_of = _compact(masks.windows[old], masks.mask_of)
    dist_windows, dist_of = _compact(dist.windows[old], dist.table)
    result = TokenTables(
        vocab_size=vocabulary.size,
        start=int(number[automaton.start]),
        class_of=np.append(table.class_of_rank, 0)[vocabulary.rank_of].astype(np.uint16),
        next=number[table.next[old]].astype(np.uint16),
        count=None if table.count is None else table.count[old],
        mask_windows=mask_windows,
        mask_of=mask_of,
        masks=masks.masks,
        accepting=automaton.accepting[old],
        dist_windows=dist_windows,
        dist_of=dist_of,
        slack=farthest[old],
        byte_state=old.astype(np.int32),
        end_ids=vocabulary.end_ids,
        forced=forced[old],
    )
    if result.nbytes > budget.max_bytes:
        raise TooLarge(f"the token tables need {result.nbytes} bytes, more than max_bytes={budget.max_bytes}")
    return result


def _compact(windows: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Windows and table without the entries that no state of `windows` has."""
    windows = windows.copy()
    span = windows[:, LEN_A] + windows[:, LEN_B] + 1
    place = np.repeat(windows[:, BASE] - (np.cumsum(span) - span), span) + np.arange(span.sum())
    windows[:, BASE] = np.cumsum(span) - span
    return windows, table[np.clip(place, 0, len(table) - 1)]


def _extremes(dist: Distances) -> tuple[np.ndarray, np.ndarray]:
    """int32 [N] each, the least and the greatest distance of a state, whatever the counter."""
    sizes = dist.windows[:, LEN_A] + dist.windows[:, LEN_B] + 1
    first = np.cumsum(sizes) - sizes
    return np.minimum.reduceat(dist.table, first), np.maximum.reduceat(dist.table, first)

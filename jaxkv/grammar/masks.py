"""Which tokens each state allows, as packed rows of bits without repetition.

Of a state that counts nothing the table says it all: its mask has the tokens of the classes that lead somewhere. Most masks
differ little from some other one, so only a few are drawn from all tokens, the others as what they change of one of those.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.classes import Transitions
from jaxkv.grammar.counted_masks import counted_masks
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.hashing import number_rows
from jaxkv.grammar.rows import Rows, expand
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.windows import BASE, plain_windows

MAX_CHANGES = 4_000  # tokens of a mask that are changed one by one; drawing all of 128 k costs as much


@dataclasses.dataclass(frozen=True, eq=False)
class Masks:
    """Attributes:
    windows: int32 [N, 5], where in `mask_of` a state and counter have their mask.
    mask_of: int32, a row of `masks`.
    masks: uint32 [M, ceil(V / 32)], bit `t % 32` of word `t // 32` for token t; the end ids where the text is
        complete; bits past V are 0. Row 0 allows nothing.
    """

    windows: np.ndarray
    mask_of: np.ndarray
    masks: np.ndarray


def state_masks(
    automaton: ByteAutomaton,
    rows: Rows,
    table: Transitions,
    vocabulary: TokenVocabulary,
    reached: np.ndarray,
    max_bytes: int,
) -> Masks:
    """The distinct masks of the states `reached` bool [N]; the windows of others are those of the dead state.

    Raises:
        TooLarge: they would have more than `max_bytes`.
    """
    region = np.zeros(automaton.num_states, np.int32) if automaton.counters is None else automaton.counters.region
    uncounted = np.flatnonzero((reached & (region == 0)) | (np.arange(automaton.num_states) == 0))
    allowed = np.column_stack([table.next[uncounted] != 0, automaton.accepting[uncounted]])
    mask_of, first = number_rows(_words(np.packbits(allowed, axis=1)))
    words = -(-vocabulary.size // 32)
    _check_size(len(first), words, max_bytes)
    windows = plain_windows(np.zeros(automaton.num_states, np.int32))
    windows[uncounted, BASE] = np.arange(len(uncounted))
    masks = _draw(allowed[first, :-1], table, vocabulary)
    complete = automaton.accepting[uncounted[first]]
    for end in vocabulary.end_ids:
        masks[complete, end // 32] |= np.uint32(1 << end % 32)
    counted = np.flatnonzero(reached & (region != 0))
    if not len(counted):
        return Masks(windows, mask_of.astype(np.int32), masks)
    found = counted_masks(automaton, rows, vocabulary, counted, lambda count: _check_size(count, words, max_bytes))
    windows[counted] = found.windows
    windows[counted, BASE] += len(mask_of)
    both = np.concatenate([masks, found.masks])
    number, first = number_rows(_words(both.view(np.uint8)))
    mask_of = number[np.concatenate([mask_of, len(masks) + found.mask_of])]
    return Masks(windows, mask_of.astype(np.int32), both[first])


def _check_size(num_masks: int, words: int, max_bytes: int) -> None:
    if num_masks * words * 4 > max_bytes:
        raise TooLarge(f"{num_masks} token masks of {words * 4} bytes need more than max_bytes={max_bytes}")


def _words(rows: np.ndarray) -> np.ndarray:
    """uint64 [n, w], rows uint8 [n, b] padded with zeros."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // 8) * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return padded.view(np.uint64)


def _draw(allowed: np.ndarray, table: Transitions, vocabulary: TokenVocabulary) -> np.ndarray:
    """uint32 [masks, words] of the tokens of the classes in `allowed` bool [masks, K]."""
    words = -(-vocabulary.size // 32)
    class_of = np.append(table.class_of_rank, 0)[np.append(vocabulary.rank_of, np.full(-vocabulary.size % 32, -1))]
    class_of = class_of.astype(np.intp)
    sizes = np.bincount(class_of, minlength=allowed.shape[1]).astype(np.float32)
    masks = np.zeros((len(allowed), words), np.uint32)
    change, cost = allowed.copy(), allowed @ sizes  # from the base of each mask; the first base is the empty one
    base_of = np.full(len(allowed), -1)
    flags = np.zeros(words * 32, bool)
    while (dear := cost > MAX_CHANGES).any():
        base = int(np.argmax(dear))
        np.take(allowed[base], class_of, out=flags, mode="clip")
        masks[base] = np.packbits(flags, bitorder="little").view("<u4")
        difference = allowed ^ allowed[base]
        new_cost = difference @ sizes
        better = new_cost < cost
        change[better], cost[better], base_of[better] = difference[better], new_cost[better], base
    based = np.flatnonzero(base_of >= 0)
    masks[based] = masks[base_of[based]]
    mask, column = np.nonzero(change)
    tokens = np.argsort(class_of.astype(np.uint16), kind="stable")  # narrow: sorted by radix, five times as fast
    first = np.concatenate([[0], np.cumsum(np.bincount(class_of, minlength=allowed.shape[1]))])
    index, place = expand(first[column], first[column + 1])
    token = tokens[place]
    bits = np.uint32(1) << (token % 32).astype(np.uint32)
    np.bitwise_xor.at(masks.reshape(-1), mask[index] * words + token // 32, bits)
    return masks

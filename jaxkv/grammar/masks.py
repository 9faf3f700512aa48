"""Which tokens each state allows, as packed rows of bits without repetition.

A counted string's state has one mask for each count near its limits: with K the most characters a token adds there,

    a = clip(c - (least - K - 1), 0, K + 1)   a token that leaves the string after d characters needs a > K - d
    b = clip(c - (most - K), 0, K)            any token that adds d characters needs b <= K - d

so masks differ by (a, b) only, and a + b numbers them along c: see `windows`.
"""

import dataclasses

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.borrowing import Borrowing
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.hashing import mix, split_by, sum_by
from jaxkv.grammar.rows import Rows, expand
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.windows import BASE, LEN_A, LEN_B, LOW_A, LOW_B, plain_windows


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Wanted:
    """A mask to be drawn: of `state`, tokens that stay with at most `most` characters, that leave with more than
    `above`."""

    state: np.ndarray
    above: np.ndarray
    most: np.ndarray

    def take(self, places: np.ndarray) -> "_Wanted":
        return _Wanted(self.state[places], self.above[places], self.most[places])


def state_masks(automaton: ByteAutomaton, rows: Rows, vocabulary: TokenVocabulary, max_bytes: int) -> Masks:
    """Finds the distinct masks by hashes of the sets, and draws each once.

    Raises:
        TooLarge: they would have more than `max_bytes`.
    """
    num_states = automaton.num_states
    region = np.zeros(num_states, np.int32) if automaton.counters is None else automaton.counters.region
    uncounted = np.flatnonzero(region == 0)
    painter = _Painter(automaton, rows, vocabulary)
    hashes = painter.uncounted_hashes()[uncounted]
    free = np.full(len(uncounted), 1 << 20)
    parts = [(_Wanted(uncounted, np.full_like(free, -1), free), hashes)]
    windows = plain_windows(np.zeros(num_states, np.int32))
    windows[uncounted, BASE] = np.arange(len(uncounted))
    size = len(uncounted)
    if automaton.counters is not None:
        counted = _counted_masks(automaton, painter, np.flatnonzero(region), size)
        for states, state_windows, wanted, wanted_hashes in counted:
            windows[states] = state_windows
            parts.append((wanted, wanted_hashes))
    wanted = _Wanted(*(np.concatenate([getattr(w, n) for w, _ in parts]) for n in ("state", "above", "most")))
    _, first, mask_of = np.unique(np.concatenate([h for _, h in parts]), return_index=True, return_inverse=True)
    words = -(-vocabulary.size // 32)
    if len(first) * words * 4 > max_bytes:
        raise TooLarge(f"{len(first)} token masks of {words * 4} bytes need more than max_bytes={max_bytes}")
    # The dead state's hash is 0, the lowest: its mask is row 0.
    return Masks(windows, mask_of.astype(np.int32), painter.draw(wanted.take(first)))


def _counted_masks(automaton: ByteAutomaton, painter: "_Painter", states: np.ndarray, offset: int):
    """For each kind of counted state: (states, their windows, masks wanted, their hashes)."""
    assert automaton.counters is not None
    longest, stay, leave = painter.counted_hashes(states)
    limits = automaton.counters.limits[automaton.counters.region[states]]
    kinds, kind = np.unique(np.column_stack([limits, longest]), axis=0, return_inverse=True)
    for i, (least, most, k) in enumerate(kinds.tolist()):
        members = np.flatnonzero(kind.ravel() == i)
        a, b, number = _steps_along(least, most, k)
        length = int(number[-1] - number[0]) + 1
        upper = k - b
        above = np.minimum(k - a, upper)  # leave with more than `above` and at most `upper` characters
        hashes = stay[members][:, upper + 1] + leave[members][:, upper + 1] - leave[members][:, above + 1]
        hashes += (painter.end_hash * automaton.accepting[states[members]])[:, None]
        full = np.zeros((len(members), length), np.uint64)
        filler = np.zeros(length, np.int64)  # numbers that no counter has repeat their neighbour
        filler[number - number[0]] = np.arange(len(number))
        filler = np.maximum.accumulate(filler)
        full[:] = hashes[:, filler]
        windows = np.empty((len(members), 5), np.int32)
        windows[:, BASE] = offset + np.arange(len(members)) * length - number[0]
        windows[:, LOW_A], windows[:, LEN_A] = least - k - 1, k + 1
        windows[:, LOW_B], windows[:, LEN_B] = most - k, k
        if least == 0:  # `a` never changes
            windows[:, BASE] += k + 1
            windows[:, LEN_A] = 0
        wanted = _Wanted(
            np.repeat(states[members], length),
            np.tile(above[filler], len(members)),
            np.tile(upper[filler], len(members)),
        )
        yield states[members], windows, wanted, full.ravel()
        offset += len(members) * length


def _steps_along(least: int, most: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(a, b, a + b) at the counters where they change, in order."""
    counters = np.unique(np.concatenate([[0], np.arange(least - k - 1, least + 1), np.arange(most - k, most + 1)]))
    counters = counters[(counters >= 0) & (counters <= most)]
    a = np.clip(counters - (least - k - 1), 0, k + 1)
    b = np.clip(counters - (most - k), 0, k)
    number, first = np.unique(a + b, return_index=True)
    return a[first], b[first], number


class _Painter:
    """Hashes and bits of the sets of tokens that rows allow."""

    def __init__(self, automaton: ByteAutomaton, rows: Rows, vocabulary: TokenVocabulary) -> None:
        self._automaton = automaton
        self._rows = rows
        self._vocabulary = vocabulary
        padding = np.full(-vocabulary.size % 32, -1)
        self._rank_of_bit = np.concatenate([vocabulary.rank_of, padding]).astype(np.intp)  # -1: no token
        self._token_hash = mix(np.arange(len(vocabulary.strings)), 3)
        self.end_hash = mix(np.array([0]), 4)[0]
        self._single, self._first = rows.single, rows.first
        self._ranges = dict(split_by(rows.ranges, rows.ranges[:, 0])) if len(rows.ranges) else {}
        self._place: dict[int, tuple[int, int]] = {  # state -> (group, local state)
            state: (g, local)
            for g, group in enumerate(rows.groups)
            for local, states in enumerate(group.states.T)
            for state in states.tolist()
        }
        self._pair_hash = [
            sum_by(group.template.stay_pair, self._token_hash[group.template.stay_rank], len(group.template.pairs))
            for group in rows.groups
        ]
        self._head_flags: dict[int, np.ndarray] = {}

    def uncounted_hashes(self) -> np.ndarray:
        """uint64 [N], of the set that each state allows, ends included; nonsense for counted states."""
        total = sum_by(self._single.origin, self._token_hash[self._single.where], self._automaton.num_states)
        for group, pair_hash in zip(self._rows.groups, self._pair_hash, strict=True):
            for (source, _, _), value in zip(group.template.pairs.tolist(), pair_hash, strict=True):
                total[group.states[:, source]] += value
        borrowed = Borrowing(self._rows, len(self._token_hash)).sums(self._token_hash)
        np.add.at(total, self._rows.ranges[:, 0], borrowed)
        return total + self.end_hash * self._automaton.accepting

    def counted_hashes(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(most characters a token adds, hashes of the tokens that stay with fewer than d characters, that leave so).

        The hashes are uint64 [states, longest + 2], indexed by d.
        """
        number = np.full(self._automaton.num_states, -1, np.int64)
        number[states] = np.arange(len(states))
        chosen = self._single.take(np.flatnonzero(number[self._single.origin] >= 0))
        row = number[chosen.origin]
        longest = np.zeros(len(states), np.int64)
        np.maximum.at(longest, row, chosen.ticks)
        for group in self._rows.groups:
            if number[group.states[0, 0]] >= 0:
                for source, _, ticks in group.template.pairs.tolist():
                    members = number[group.states[:, source]]
                    longest[members] = np.maximum(longest[members], ticks)
        width = int(longest.max(initial=0)) + 1
        size = len(states) * width
        hashes = self._token_hash[chosen.where]
        cell = row * width + chosen.ticks
        leave = sum_by(cell[chosen.left], hashes[chosen.left], size).reshape(-1, width)
        stay = sum_by(cell[~chosen.left], hashes[~chosen.left], size).reshape(-1, width)
        for group, pair_hash in zip(self._rows.groups, self._pair_hash, strict=True):
            if number[group.states[0, 0]] >= 0:
                for (source, _, ticks), value in zip(group.template.pairs.tolist(), pair_hash, strict=True):
                    stay[number[group.states[:, source]], ticks] += value
        return longest, _sums_before(stay), _sums_before(leave)

    def draw(self, wanted: _Wanted) -> np.ndarray:
        """uint32 [masks, words]."""
        dense = np.array([s in self._place or s in self._ranges for s in wanted.state.tolist()], bool)
        masks = self._draw_sparse(wanted.state, wanted.above, wanted.most, ~dense)
        for i in np.flatnonzero(dense).tolist():
            flags = self._flags(int(wanted.state[i]), int(wanted.above[i]), int(wanted.most[i]))
            masks[i] = self._pack(flags)
        ends = self._vocabulary.end_ids
        complete = np.flatnonzero(self._automaton.accepting[wanted.state])
        for end in ends:
            masks[complete, end // 32] |= np.uint32(1 << end % 32)
        return masks

    def _draw_sparse(self, state: np.ndarray, above: np.ndarray, most: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Masks of single tokens only; the rows that are not chosen stay empty."""
        words = -(-self._vocabulary.size // 32)
        rows = np.flatnonzero(chosen)
        index, entry = expand(self._first[state[rows]], self._first[state[rows] + 1])
        mask = rows[index]
        step = self._single
        fits = (step.ticks[entry] <= most[mask]) & (~step.left[entry] | (step.ticks[entry] > above[mask]))
        mask, rank = mask[fits], step.where[entry[fits]]
        ids, first = self._vocabulary.ranked_ids
        index, place = expand(first[rank], first[rank + 1])
        token = ids[place]
        cell = mask[index] * words + token // 32
        masks = np.zeros(len(state) * words, np.uint32)
        # Each bit comes once, so adding is or-ing.
        np.add.at(masks, cell, (np.uint32(1) << (token % 32).astype(np.uint32)))
        return masks.reshape(len(state), words)

    def _flags(self, state: int, above: int, most: int) -> np.ndarray:
        """bool [ranks]."""
        flags = np.zeros(len(self._token_hash), bool)
        for _, low, high, head in self._ranges.get(state, np.zeros((0, 4), np.int32)).tolist():
            flags[low:high] = self._flags_of_head(head)[low:high]
        if state in self._place:
            group, local = self._place[state]
            template = self._rows.groups[group].template
            fits = (template.pairs[:, 0] == local) & (template.pairs[:, 2] <= most)
            flags[template.stay_rank[fits[template.stay_pair]]] = True
        own = self._single.take(np.arange(self._first[state], self._first[state + 1]))
        fits = (own.ticks <= most) & (~own.left | (own.ticks > above))
        flags[own.where[fits]] = True
        return flags

    def _flags_of_head(self, head: int) -> np.ndarray:
        if head not in self._head_flags:
            group, _ = self._place[head]
            flags = self._rows.groups[group].template.head_pair >= 0
            flags[self._single.where[self._first[head] : self._first[head + 1]]] = True
            self._head_flags[head] = flags
        return self._head_flags[head]

    def _pack(self, flags: np.ndarray) -> np.ndarray:
        return np.packbits(np.append(flags, False)[self._rank_of_bit], bitorder="little").view("<u4")


def _sums_before(values: np.ndarray) -> np.ndarray:
    """[n, d + 1]: the sum of the first d columns."""
    return np.concatenate([np.zeros((len(values), 1), np.uint64), np.cumsum(values, axis=1, dtype=np.uint64)], axis=1)

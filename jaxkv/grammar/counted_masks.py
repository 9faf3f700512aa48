"""The masks of states inside counted strings, one for each count near its limits.

With K the most characters a token adds there,

    a = clip(c - (least - K - 1), 0, K + 1)   a token that leaves the string after d characters needs a > K - d
    b = clip(c - (most - K), 0, K)            any token that adds d characters needs b <= K - d

so masks differ by (a, b) only, and a + b numbers them along c: see `windows`.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.hashing import mix, split_by, sum_by
from jaxkv.grammar.rows import Rows
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.walk import MAX_TICKS
from jaxkv.grammar.windows import BASE, LEN_A, LEN_B, LOW_A, LOW_B


@dataclasses.dataclass(frozen=True, eq=False)
class CountedMasks:
    """Attributes:
    windows: int32 [states, 5], where in `mask_of` a state and counter have their mask.
    mask_of: int64, a row of `masks`.
    masks: uint32 [M, ceil(V / 32)]; no text ends inside a counted string.
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


def counted_masks(
    automaton: ByteAutomaton,
    rows: Rows,
    vocabulary: TokenVocabulary,
    states: np.ndarray,
    check: Callable[[int], None],
) -> CountedMasks:
    """Finds the distinct masks by hashes of the sets, and draws each once.

    Args:
        automaton: with counters.
        rows: of the automaton.
        vocabulary: the tokens.
        states: int64, inside counted strings.
        check: told how many masks there will be; raises what it likes if they are too many.
    """
    painter = _Painter(automaton, rows, vocabulary)
    windows = np.zeros((len(states), 5), np.int32)
    parts: list[tuple[_Wanted, np.ndarray]] = []
    for members, member_windows, wanted, hashes in _kinds(automaton, painter, states):
        windows[members] = member_windows
        parts.append((wanted, hashes))
    wanted = _Wanted(*(np.concatenate([getattr(w, n) for w, _ in parts]) for n in ("state", "above", "most")))
    _, first, mask_of = np.unique(np.concatenate([h for _, h in parts]), return_index=True, return_inverse=True)
    check(len(first))
    return CountedMasks(windows, mask_of, painter.draw(wanted.take(first)))


def _kinds(automaton: ByteAutomaton, painter: "_Painter", states: np.ndarray):
    """For each kind of counted state: (places in `states`, their windows, masks wanted, their hashes)."""
    assert automaton.counters is not None
    offset = 0
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
        yield members, windows, wanted, full.ravel()
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
        self._automaton, self._rows, self._vocabulary = automaton, rows, vocabulary
        padding = np.full(-vocabulary.size % 32, -1)
        self._rank_of_bit = np.concatenate([vocabulary.rank_of, padding]).astype(np.intp)  # -1: no token
        self._token_hash = mix(np.arange(len(vocabulary.strings)), 3)
        self._place: dict[int, tuple[int, int]] = {  # state -> (group, local state)
            state: (g, local)
            for g, group in enumerate(rows.groups)
            for local, states in enumerate(group.states.T)
            for state in states.tolist()
        }

    def counted_hashes(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(most characters a token adds, hashes of the tokens that stay with fewer than d characters, that leave so).

        The hashes are uint64 [states, longest + 2], indexed by d.
        """
        number = np.full(self._automaton.num_states, -1, np.int64)
        number[states] = np.arange(len(states))
        chosen = self._rows.single.take(np.flatnonzero(number[self._rows.single.origin] >= 0))
        row = number[chosen.origin]
        longest = np.zeros(len(states), np.int64)
        np.maximum.at(longest, row, chosen.ticks)
        for group in self._rows.groups:
            for source, _, ticks in group.template.pairs.tolist():
                members = number[group.states[:, source]]
                members = members[members >= 0]
                longest[members] = np.maximum(longest[members], ticks)
        width = int(longest.max(initial=0)) + 1
        size = len(states) * width
        hashes = self._token_hash[chosen.where]
        cell = row * width + chosen.ticks
        leave = sum_by(cell[chosen.left], hashes[chosen.left], size).reshape(-1, width)
        stay = sum_by(cell[~chosen.left], hashes[~chosen.left], size).reshape(-1, width)
        for group in self._rows.groups:
            if not (number[group.states] >= 0).any():
                continue
            template = group.template
            values = sum_by(template.stay_pair, self._token_hash[template.stay_rank], len(template.pairs))
            for (source, _, ticks), value in zip(template.pairs.tolist(), values, strict=True):
                members = number[group.states[:, source]]
                stay[members[members >= 0], ticks] += value
        return longest, _sums_before(stay), _sums_before(leave)

    def draw(self, wanted: _Wanted) -> np.ndarray:
        """uint32 [masks, words]."""
        ticks = np.arange(MAX_TICKS + 1)
        masks = np.zeros((len(wanted.state), len(self._rank_of_bit) // 32), np.uint32)
        for state, places in split_by(np.arange(len(wanted.state)), wanted.state):
            kinds = self._kinds(state)
            for place in places.tolist():
                stays = ticks <= wanted.most[place]
                allowed = np.concatenate([[False], stays, stays & (ticks > wanted.above[place])])
                masks[place] = np.packbits(allowed[kinds], bitorder="little").view("<u4")
        return masks

    def _kinds(self, state: int) -> np.ndarray:
        """int64 [bits]: 0 if a token is not allowed, 1 + its characters if it stays, as many more as there can be if it leaves.

        No state inside a counted string has ranges: heads of loops cannot stand for it.
        """
        of_rank = np.zeros(len(self._token_hash) + 1, np.intp)
        if state in self._place:
            group, local = self._place[state]
            template = self._rows.groups[group].template
            stays = template.pairs[template.stay_pair, 0] == local
            of_rank[template.stay_rank[stays]] = 1 + template.pairs[template.stay_pair[stays], 2]
        own = self._rows.single.take(np.arange(self._rows.first[state], self._rows.first[state + 1]))
        of_rank[own.where] = 1 + own.ticks + own.left * (MAX_TICKS + 1)
        return of_rank[self._rank_of_bit]


def _sums_before(values: np.ndarray) -> np.ndarray:
    """[n, d + 1]: the sum of the first d columns."""
    return np.concatenate([np.zeros((len(values), 1), np.uint64), np.cumsum(values, axis=1, dtype=np.uint64)], axis=1)

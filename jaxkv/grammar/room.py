"""Which grammars are in the device's pools, and where: the host's side of them.

A grammar is pinned while a row uses it. When there is no room the ones unused for longest go; steps in flight have read
the tables before a new one is written over them, for the device runs in order.
"""

import collections

import numpy as np

from jaxkv.config import GrammarSizes
from jaxkv.grammar.compiled import OnDevice
from jaxkv.grammar.tables import TokenTables
from jaxkv.grammar.windows import BASE
from jaxkv.grammar_layout import (
    DIST,
    FIRST,
    MASK,
    MAX_CLASSES,
    MAY,
    NEVER,
    SLACK,
    STATE_COLUMNS,
    STOPS,
    GrammarLoad,
    GrammarPlace,
)


class Ranges:
    """Free entries of one pool; the first gap that is large enough is taken.

    Args:
        first: before it lie entries that are never given away.
        size: entries from there on.
    """

    def __init__(self, first: int, size: int) -> None:
        self._free = [(first, size)]  # (start, length), by start, never adjacent

    def take(self, size: int) -> int | None:
        """The first of `size` entries in a row."""
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Takes entries back."""
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (start, size)]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged


class _Resident:
    def __init__(self, place: GrammarPlace, takes: tuple[tuple[int, int], ...]) -> None:
        self.place = place
        self.takes = takes  # (start, size) in each pool
        self.num_pins = 0


class GrammarRoom:
    """Owns the places in the pools.

    Args:
        sizes: of the pools.
        max_rows: rows, each of which has a state, a lookup and a mask of its own for a matcher on the host.
    """

    def __init__(self, sizes: GrammarSizes, max_rows: int) -> None:
        self._sizes = sizes
        self._num_host = max_rows + 1  # entry 0 is that of no grammar
        self._loads: list[GrammarLoad] = []
        self.num_loads = 0  # so far
        self.clear()

    def clear(self) -> None:
        """Empty pools: nobody has a pin, the device's tables are gone."""
        sizes = self._sizes
        self._pools = (
            Ranges(self._num_host, sizes.num_states),
            Ranges(1, sizes.num_transitions),
            Ranges(self._num_host, sizes.num_lookups),
            Ranges(self._num_host, sizes.num_masks),
            Ranges(1, sizes.num_grammars),
        )
        self._residents: collections.OrderedDict[str, _Resident] = (
            collections.OrderedDict()
        )  # least recently used first
        self._loads = []

    def fits(self, tables: TokenTables) -> bool:
        """Whether the grammar could be here if it were alone."""
        sizes = self._sizes
        caps = sizes.num_states, sizes.num_transitions, sizes.num_lookups, sizes.num_masks, sizes.num_grammars
        return tables.next.shape[1] <= MAX_CLASSES and all(
            need <= cap for need, cap in zip(_needs(tables), caps, strict=True)
        )

    def pin(self, grammar: OnDevice) -> bool:
        """Keeps the grammar there for one more row; False if there is no room as long as other rows keep theirs."""
        resident = self._residents.get(grammar.key) or self._bring_in(grammar)
        if resident is None:
            return False
        self._residents.move_to_end(grammar.key)
        resident.num_pins += 1
        return True

    def place_of(self, grammar: OnDevice) -> GrammarPlace:
        """Of a pinned grammar."""
        return self._residents[grammar.key].place

    def unpin(self, grammar: OnDevice) -> None:
        resident = self._residents[grammar.key]
        assert resident.num_pins > 0
        resident.num_pins -= 1

    def take_loads(self) -> tuple[GrammarLoad, ...]:
        """What the device must write before the next step, in this order."""
        loads, self._loads = tuple(self._loads), []
        return loads

    @property
    def num_resident(self) -> int:
        return len(self._residents)

    def check(self, num_pins: dict[str, int]) -> None:
        """Asserts that rows and pins agree; for tests."""
        pins = {key: resident.num_pins for key, resident in self._residents.items() if resident.num_pins}
        assert pins == num_pins, (pins, num_pins)

    def _bring_in(self, grammar: OnDevice) -> _Resident | None:
        needs = _needs(grammar.tables)
        while (takes := self._take_all(needs)) is None:
            key = next((key for key, other in self._residents.items() if not other.num_pins), None)
            if key is None:
                return None
            for pool, (start, size) in zip(self._pools, self._residents.pop(key).takes, strict=True):
                pool.give(start, size)
        states, transitions, lookups, masks, classes = (start for start, _ in takes)
        place = GrammarPlace(states, transitions, classes)
        self._loads.append(_load(grammar.tables, place, lookups, masks))
        self.num_loads += 1
        resident = self._residents[grammar.key] = _Resident(place, takes)
        return resident

    def _take_all(self, needs: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        takes: list[tuple[int, int]] = []
        for pool, size in zip(self._pools, needs, strict=True):
            start = pool.take(size)
            if start is None:
                for other, (begin, length) in zip(self._pools, takes, strict=False):
                    other.give(begin, length)
                return None
            takes.append((start, size))
        return tuple(takes)


def _needs(tables: TokenTables) -> tuple[int, ...]:
    """Entries in each pool: states, transitions, lookups, masks, classes."""
    return len(tables.next), len(tables.packed.next), len(tables.mask_of) + len(tables.dist_of), len(tables.masks), 1


def _load(tables: TokenTables, place: GrammarPlace, first_lookup: int, first_mask: int) -> GrammarLoad:
    states = np.zeros((len(tables.next), STATE_COLUMNS), np.int32)
    states[:, MASK : MASK + 5] = tables.mask_windows
    states[:, DIST : DIST + 5] = tables.dist_windows
    states[:, MASK + BASE] += first_lookup
    states[:, DIST + BASE] += first_lookup + len(tables.mask_of)
    states[:, SLACK] = tables.slack
    states[:, STOPS] = np.where(tables.accepting, MAY, NEVER)
    packed = tables.packed
    states[:, FIRST] = packed.first
    return GrammarLoad(
        place=place,
        first_lookup=first_lookup,
        first_mask=first_mask,
        states=states,
        transitions=packed.next,
        effects=np.zeros(len(packed.next), np.int16) if packed.count is None else packed.count,
        lookups=np.concatenate([tables.mask_of + first_mask, tables.dist_of]).astype(np.int32),
        class_of=tables.class_of,
        masks=tables.masks,
    )

"""How a grammar lies in the device's pools: what the host writes and `automata` reads."""

import dataclasses
import typing

import numpy as np

# Columns of a state. MASK and DIST are the first of five each, see `grammar.windows`: the row of its mask, the fewest
# tokens to where the output may end.
MASK, DIST = 0, 5
SLACK = 10  # most tokens that any token allowed here leaves to go: with this many left, every allowed one fits
STOPS = 11  # what becomes of stop ids, below
FIRST = 12  # where its transitions begin, counted from the grammar's first, see `grammar.packing`
STATE_COLUMNS = 13

NEVER, MAY, AS_MASKED = range(3)  # stop ids are forbidden, allowed, or as the mask has them

MAX_CLASSES = 4096  # token classes of a grammar; real ones have some hundreds


class GrammarPlace(typing.NamedTuple):
    """Where a grammar lies in the pools."""

    states: int  # first of its states; never 0, which stands for no grammar
    transitions: int  # first of its transitions
    classes: int  # its row of token classes


@dataclasses.dataclass(frozen=True, eq=False)
class GrammarLoad:
    """Writes a grammar's tables into the pools, at places that nobody uses."""

    place: GrammarPlace
    first_lookup: int
    first_mask: int
    states: np.ndarray  # int32 [S, STATE_COLUMNS]
    transitions: np.ndarray  # uint16 [cells]: the state that follows, counted from the first
    effects: np.ndarray  # int16 [cells]: on the counter; >= 0 adds, < 0 sets to the complement
    lookups: np.ndarray  # int32 [.]: rows of masks in the pool, and distances
    class_of: np.ndarray  # uint16 [V]
    masks: np.ndarray  # uint32 [M, ceil(V / 32)]


def host_row(row: int) -> GrammarPlace:
    """The place of a row whose grammar is matched on the host: a state of its own, whose mask is written before each step."""
    return GrammarPlace(states=row + 1, transitions=0, classes=0)

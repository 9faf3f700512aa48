"""A deterministic automaton over bytes: what a regex, a choice or a JSON Schema compiles to.

State 0 is dead. All other states can reach acceptance (the automaton is trimmed), so a text that is alive can always
be completed. `next` has one column for each class of bytes that no state tells apart.

Counted strings (`maxLength: 4096`) would need thousands of states; they use one counter register instead, see `Counters`.
"""

import dataclasses
import functools

import numpy as np

DEAD = 0

NO_TICK, TICK, ENTER = 0, 1, 2  # effects of a transition on the counter


@dataclasses.dataclass(frozen=True, eq=False)
class Counters:
    """One counter register, shared by all counted regions; at most one region is active at a time.

    A region is a set of states that count the characters of one string. With `s -c-> t` the transition taken, in order:

    1. If `region[s] != 0 and region[t] != region[s]` (the string is left) the counter must be `>= limits[region[s], 0]`.
    2. `tick[s, c]`: ENTER (2) sets the counter to 0; TICK (1) adds one; NO_TICK (0) leaves it.
    3. After a TICK the counter must be `<= limits[region[t], 1]`.

    A transition that fails a check is dead. A tick is on the first byte of a character, so a character that was begun can
    be finished, and no check can make a state a dead end: in a region the string can be closed once the minimum is
    reached, and until then a character can be added. Counters outside a region mean nothing.

    Attributes:
        region: int16 [N], the region of each state; 0 is none.
        limits: int32 [regions + 1, 2], least and most characters of a region; row 0 is unused.
        tick: int8 [N, C], effect of each transition.
    """

    region: np.ndarray
    limits: np.ndarray
    tick: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Deterministic automaton over bytes; state 0 is dead, every other state can reach acceptance.

    Attributes:
        byte_class: uint8 [256], the class of each byte.
        next: int32 [N, C], state after a byte of a class; 0 is dead. Row 0 is all zero.
        accepting: bool [N]; `accepting[0]` is False.
        start: state before the first byte; 0 if nothing is accepted.
        counters: counted strings; None where there are none.
    """

    byte_class: np.ndarray
    next: np.ndarray
    accepting: np.ndarray
    start: int
    counters: Counters | None = None

    @property
    def num_states(self) -> int:
        """States with the dead one."""
        return int(self.next.shape[0])

    @property
    def num_classes(self) -> int:
        """Classes of bytes."""
        return int(self.next.shape[1])

    @property
    def nbytes(self) -> int:
        """Host memory of the tables."""
        arrays = [self.byte_class, self.next, self.accepting]
        if self.counters is not None:
            arrays += [self.counters.region, self.counters.limits, self.counters.tick]
        return sum(array.nbytes for array in arrays)

    @property
    def is_empty(self) -> bool:
        """True if no text is accepted."""
        return self.start == DEAD

    @functools.cached_property
    def class_bytes(self) -> np.ndarray:
        """int32 [C]: the first byte of each class."""
        first = np.zeros(self.num_classes, np.int32)
        first[self.byte_class[::-1]] = np.arange(255, -1, -1, dtype=np.int32)
        return first

    def step(self, state: int, counter: int, byte: int) -> tuple[int, int]:
        """State and counter after one byte: the slow reference for the rules that `Counters` states."""
        column = int(self.byte_class[byte])
        after = int(self.next[state, column])
        if after == DEAD or self.counters is None:
            return after, counter
        region, limits, effect = self.counters.region, self.counters.limits, int(self.counters.tick[state, column])
        if region[state] and region[after] != region[state] and counter < limits[region[state], 0]:
            return DEAD, counter
        if effect == ENTER:
            return after, 0
        if effect == TICK:
            counter += 1
            if counter > limits[region[after], 1]:
                return DEAD, counter
        return after, counter

    def run(self, text: bytes) -> tuple[int, int]:
        """State and counter after `text` from the start; state 0 if no accepted text begins so."""
        state, counter = self.start, 0
        for byte in text:
            state, counter = self.step(state, counter, byte)
            if state == DEAD:
                break
        return state, counter

    def matches(self, text: bytes | str) -> bool:
        """Whether the automaton accepts exactly this text (a str as UTF-8)."""
        state, _ = self.run(text.encode() if isinstance(text, str) else text)
        return bool(self.accepting[state])

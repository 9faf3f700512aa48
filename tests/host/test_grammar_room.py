"""Places of grammars in the device's pools: never two in one, unused ones go first, pinned ones never."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.config import GrammarSizes
from jaxkv.grammar.compiled import OnDevice
from jaxkv.grammar.regex import compile_regex
from jaxkv.grammar.room import GrammarRoom, Ranges
from jaxkv.grammar.tables import build_tables
from jaxkv.grammar.vocabulary import make_vocabulary
from jaxkv.grammar.windows import address
from jaxkv.grammar_layout import FIRST, MASK, STATE_COLUMNS

VOCABULARY = make_vocabulary([bytes([i]) for i in range(97, 123)] + [b"ab", b"cd", b"abc", b""], size=30)
MAX_ROWS = 4


def grammar(pattern: str) -> OnDevice:
    return OnDevice(pattern, build_tables(compile_regex(pattern), VOCABULARY))


GRAMMARS = [grammar(pattern) for pattern in ("a{1,3}", "(ab)+c?", "[a-z]{2,9}", "x|yz", "abc*d{2,5}")]


def test_ranges_merge_again() -> None:
    ranges = Ranges(3, 10)
    first, second, third = ranges.take(4), ranges.take(4), ranges.take(3)
    assert (first, second, third) == (3, 7, None)
    ranges.give(3, 4)
    assert ranges.take(5) is None, "there are two gaps"
    ranges.give(7, 4)
    assert ranges.take(10) == 3


@given(st.lists(st.tuples(st.sampled_from(range(len(GRAMMARS))), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_pins(operations: list[tuple[int, bool]]) -> None:
    """The pools, written as the device writes them, hold each pinned grammar whole."""
    sizes = GrammarSizes(num_grammars=3, num_states=40, num_transitions=250, num_lookups=90, num_masks=24)
    room, pins = GrammarRoom(sizes, MAX_ROWS), dict.fromkeys(range(len(GRAMMARS)), 0)
    masks, lookups = np.zeros((200, 1), np.uint32), np.zeros(500, np.int64)
    states, transitions = np.zeros((200, STATE_COLUMNS), np.int64), np.zeros(2000, np.int64)
    for index, is_pin in operations:
        if not is_pin and pins[index]:
            room.unpin(GRAMMARS[index])
            pins[index] -= 1
        elif is_pin and room.pin(GRAMMARS[index]):
            pins[index] += 1
        elif is_pin:
            assert any(pins.values()), "an empty room has place for anything that fits"
        for load in room.take_loads():
            masks[load.first_mask : load.first_mask + len(load.masks)] = load.masks
            lookups[load.first_lookup : load.first_lookup + len(load.lookups)] = load.lookups
            states[load.place.states : load.place.states + len(load.states)] = load.states
            transitions[load.place.transitions : load.place.transitions + len(load.transitions)] = load.transitions
        room.check({GRAMMARS[i].key: num for i, num in pins.items() if num})
        for i, num in pins.items():
            if not num:
                continue
            tables, place = GRAMMARS[i].tables, room.place_of(GRAMMARS[i])
            own = states[place.states : place.states + tables.num_states]
            for state in range(tables.num_states):
                at = lookups[address(own[:, MASK : MASK + 5].astype(np.int32), state, 0)]
                assert (masks[at] == tables.masks[tables.mask_of[address(tables.mask_windows, state, 0)]]).all()
            state, token_class = np.nonzero(tables.next)
            cells = place.transitions + own[state, FIRST] + token_class
            assert (transitions[cells] == tables.next[state, token_class]).all()


def test_what_can_never_fit_is_said() -> None:
    room = GrammarRoom(GrammarSizes(num_masks=1), MAX_ROWS)
    assert not room.fits(GRAMMARS[2].tables)
    assert GrammarRoom(GrammarSizes(), MAX_ROWS).fits(GRAMMARS[2].tables)


# --- grammars for some of the tokens ---------------------------------------------------------------------------------

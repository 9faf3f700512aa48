"""An automaton from a transition function in Python."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import DEFAULT_BUDGET, Budget
from jaxkv.grammar.minimise import minimise

State = TypeVar("State", bound=Hashable)


def explore(
    start: State,
    step: Callable[[State, str], State | None],
    accepts: Callable[[State], bool],
    alphabet: Sequence[str],
    budget: Budget = DEFAULT_BUDGET,
) -> ByteAutomaton:
    """Tries every symbol in every state.

    Args:
        start: state before the first symbol.
        step: state after a symbol; None if there is none.
        accepts: whether a text may end in a state.
        alphabet: symbols, each a text of ASCII characters that are treated alike and passed by their first.
        budget: limits of states.

    Raises:
        TooLarge: over the budget.
    """
    byte_class = np.zeros(256, np.uint8)
    for column, symbols in enumerate(alphabet, start=1):
        for symbol in symbols:
            byte_class[ord(symbol)] = column
    number = {start: 1}
    order = [start]
    rows = [[0] * (len(alphabet) + 1)]
    for state in order:
        row = [0]
        for symbols in alphabet:
            after = step(state, symbols[0])
            if after is None:
                row.append(0)
                continue
            if after not in number:
                number[after] = len(order) + 1
                order.append(after)
                budget.check(len(order))
            row.append(number[after])
        rows.append(row)
    accepting = np.array([False, *(accepts(state) for state in order)])
    return minimise(ByteAutomaton(byte_class, np.array(rows, np.int32), accepting, 1))

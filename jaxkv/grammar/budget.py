"""How large an automaton may become."""

import dataclasses

from jaxkv.grammar.errors import TooLarge


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of one compilation.

    Args:
        states: of the finished automaton, and of each part while it is built.
        work: of the nondeterministic automaton that it is made from, in states.
    """

    states: int = 40_000
    work: int = 160_000

    def check(self, states: int, what: str = "the automaton") -> None:
        """Raises `TooLarge` if `states` are too many for a deterministic automaton."""
        if states > self.states:
            raise TooLarge(f"{what} needs more than {self.states} states; raise the budget or use the host matcher")


DEFAULT_BUDGET = Budget()

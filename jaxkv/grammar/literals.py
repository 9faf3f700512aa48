"""Automata of fixed texts."""

from collections.abc import Sequence

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import DEFAULT_BUDGET, Budget
from jaxkv.grammar.determinise import determinise
from jaxkv.grammar.graph import FINAL, Graph


def choice(texts: Sequence[str | bytes], budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """Exactly one of the texts.

    Raises:
        TooLarge: over the budget.
    """
    graph = Graph(budget)
    starts = [graph.literal(text.encode() if isinstance(text, str) else text, FINAL) for text in texts]
    return determinise(graph, graph.union(starts))

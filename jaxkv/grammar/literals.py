"""Automata of fixed texts."""

from collections.abc import Sequence

import numpy as np

from jaxkv.grammar.automaton import DEAD, ByteAutomaton
from jaxkv.grammar.budget import DEFAULT_BUDGET, Budget
from jaxkv.grammar.determinise import byte_classes, determinise
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.minimise import minimise


def choice(texts: Sequence[str | bytes], budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """Exactly one of the texts.

    Raises:
        TooLarge: over the budget.
    """
    graph = Graph(budget)
    starts = [graph.literal(text.encode() if isinstance(text, str) else text, FINAL) for text in texts]
    return determinise(graph, graph.union(starts))


def without(automaton: ByteAutomaton, texts: Sequence[bytes]) -> ByteAutomaton:
    """What an automaton without counters accepts, but for some texts: it follows them as long as a text begins as they do."""
    used = np.zeros(256, np.int64)
    used[sorted({byte for text in texts for byte in text})] = 1
    own = np.cumsum(used) * used
    byte_class, first = byte_classes([automaton.byte_class, own])
    wide = automaton.next[:, automaton.byte_class[first]]
    count = automaton.num_states
    state_of, children, ends = [automaton.start], {}, set()
    for text in texts:
        node = 0
        for byte in text:
            column = int(byte_class[byte])
            after = int(wide[state_of[node], column])
            if after == DEAD:
                break
            key = (node, column)
            if key not in children:
                children[key] = len(state_of)
                state_of.append(after)
            node = children[key]
        else:
            ends.add(node)
    table = np.concatenate([wide, wide[state_of]])
    for (node, column), child in children.items():
        table[count + node, column] = count + child
    accepting = np.concatenate([automaton.accepting, automaton.accepting[state_of]])
    accepting[[count + node for node in ends]] = False
    return minimise(ByteAutomaton(byte_class, table, accepting, count))

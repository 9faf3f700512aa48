"""Token level by running every token's bytes from every state: the slow reference for `tables`."""

from collections import deque

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.grammar.walk import MAX_TICKS

Place = tuple[int, int]  # state of the byte automaton, counter; the counter is 0 where it means nothing


def step_token(automaton: ByteAutomaton, place: Place, token: bytes) -> Place | None:
    """Place after a token; None if it is not allowed, which in a counted string a token of too many characters is."""
    state, counter = place
    counters = automaton.counters
    region = 0 if counters is None else counters.region[state]
    ticks = 0
    for byte in token:
        column = automaton.byte_class[byte]
        if region and counters is not None and counters.region[state] == region:
            ticks += counters.tick[state, column] == 1
        else:
            region = 0
        state, counter = automaton.step(state, counter, byte)
        if state == 0:
            return None
    if ticks > MAX_TICKS:
        return None
    return state, counter if counters is not None and counters.region[state] else 0


class PlainTables:
    """All places that tokens reach, with what each token does there."""

    def __init__(self, automaton: ByteAutomaton, vocabulary: TokenVocabulary) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        tokens = [vocabulary.token_bytes(i) for i in range(vocabulary.size)]
        self.after: dict[Place, dict[int, Place]] = {}
        self.start: Place = (automaton.start, 0)
        todo = deque([self.start])
        while todo:
            place = todo.popleft()
            if place in self.after:
                continue
            steps = {i: step_token(automaton, place, token) for i, token in enumerate(tokens) if token}
            self.after[place] = {i: after for i, after in steps.items() if after is not None}
            todo.extend(self.after[place].values())
        self.dist = self._distances()
        # No token may lead to where none of them goes on.
        for place, steps in self.after.items():
            self.after[place] = {i: after for i, after in steps.items() if after in self.dist}

    def _distances(self) -> dict[Place, int]:
        before: dict[Place, set[Place]] = {}
        for place, steps in self.after.items():
            for after in steps.values():
                before.setdefault(after, set()).add(place)
        dist = {place: 0 for place in self.after if self.automaton.accepting[place[0]]}
        todo = deque(dist)
        while todo:
            place = todo.popleft()
            for earlier in before.get(place, ()):
                if earlier not in dist:
                    dist[earlier] = dist[place] + 1
                    todo.append(earlier)
        return dist

    def mask(self, place: Place) -> np.ndarray:
        """bool [V]"""
        allowed = np.zeros(self.vocabulary.size, bool)
        allowed[list(self.after[place])] = True
        if self.automaton.accepting[place[0]]:
            allowed[list(self.vocabulary.end_ids)] = True
        return allowed

"""Tokens that a grammar leaves no choice about, as the model's own tokenizer would write them.

Where the automaton allows one byte after another and nothing else, the text is known; its tokens are not quite: the
model might go on with a token that reaches over the end of that text. A model that is fed tokens it would never write
itself gets worse, so only tokens are forced that stay the same whatever comes next. This is what llguidance's
`compute_ff_tokens` does, with one thing more: of what may come next only what the grammar allows counts.

What is forced depends on the state alone, so it can be part of the token tables (`force`): there the mask of a forced
state has that one token. Whether it is then sampled or known beforehand makes no difference, and a request's tokens do
not depend on when somebody had time to look.
"""

import dataclasses
import functools

import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.automaton import DEAD, ByteAutomaton
from jaxkv.grammar.rows import Rows
from jaxkv.grammar.trie import find_node
from jaxkv.grammar.vocabulary import TokenVocabulary

MAX_TAIL = 32  # bytes of the longest token that may reach over the end; longer ones are runs of spaces and dashes
MAX_PROBES = 32  # continuations that are tried against the tokenizer
PROBES_PER_BYTE = 8
MAX_LOOKS = 80  # states of a grammar whose text is tokenised, a millisecond each; the rest stay as they are


@dataclasses.dataclass(frozen=True, eq=False)
class ForcedText:
    """What must follow in the states of an automaton.

    Args:
        automaton: of a grammar.
        vocabulary: with `encode`, or nothing is forced.
    """

    automaton: ByteAutomaton
    vocabulary: TokenVocabulary

    def tokens_after(self, byte_state: int) -> tuple[int, ...]:
        """Ids that must follow; none if there is a choice at once, or if it is not certain how the text is written."""
        if self.vocabulary.encode is None or not self.is_forced[byte_state]:
            return ()
        text = _whole_characters(self.forced_bytes(byte_state))
        ids = self._encode(text)
        if not text or ids is None:
            return ()
        end_state = self._run(byte_state, text)
        certain = len(text) - self._open_tail(text, end_state)
        ends = np.cumsum([len(self.vocabulary.token_bytes(i)) for i in ids])
        ids = ids[: int(np.searchsorted(ends, certain, side="right"))]
        for probe in self._probes(end_state) if ids else ():  # merges may reach farther back than any one token
            longer = self._encode(text + probe)
            if longer is None:
                return ()
            same = [a == b for a, b in zip(ids, longer, strict=False)]
            ids = ids[: same.index(False) if False in same else len(same)]
        return tuple(ids)

    @property
    def is_forced(self) -> np.ndarray:
        """bool [N], only one byte may come in a state."""
        return self._single_byte >= 0

    @functools.cached_property
    def _single_byte(self) -> np.ndarray:
        """int32 [N], the only byte that may come in a state; -1 if there are more, or the text may end."""
        automaton = self.automaton
        width = np.bincount(automaton.byte_class, minlength=automaton.num_classes)
        alive = automaton.next != DEAD
        single = ((alive @ width) == 1) & ~automaton.accepting
        if automaton.counters is not None:  # what may come there depends on the counter
            single &= automaton.counters.region == 0
        return np.where(single, automaton.class_bytes[np.argmax(alive, axis=1)], -1).astype(np.int32)

    def forced_bytes(self, byte_state: int) -> bytes:
        """The bytes that must follow a state of the byte automaton."""
        found = bytearray()
        while (byte := int(self._single_byte[byte_state])) >= 0:
            found.append(byte)
            byte_state = int(self.automaton.next[byte_state, self.automaton.byte_class[byte]])
            assert len(found) <= self.automaton.num_states, "forced bytes without an end"
        return bytes(found)

    def _encode(self, text: bytes) -> list[int] | None:
        """Ids of the text; None if the tokenizer does not write just this text (it normalises, or has no tokens)."""
        assert self.vocabulary.encode is not None
        try:
            ids = self.vocabulary.encode(text.decode())
        except RequestError:
            return None
        return ids if b"".join(self.vocabulary.token_bytes(i) for i in ids) == text else None

    def _open_tail(self, text: bytes, end_state: int) -> int:
        """Bytes of the longest tail of `text` that a longer token begins with, and goes on as the grammar allows."""
        for tail in range(min(len(text), MAX_TAIL), 0, -1):
            node = find_node(self.vocabulary.trie, text[-tail:])
            if node is not None and self._goes_on(node, end_state):
                return tail
        return 0

    def _goes_on(self, node: int, state: int) -> bool:
        """Whether a token below a node of the trie, not its own, may be read on from a state."""
        trie, automaton = self.vocabulary.trie, self.automaton
        stack = [(node, state)]
        while stack:
            node, state = stack.pop()
            first, last = int(trie.first_child[node]), int(trie.first_child[node + 1])
            after = automaton.next[state, automaton.byte_class[trie.byte[first:last]]]
            alive = np.flatnonzero(after)
            if trie.ends[first + alive].any():
                return True
            stack += zip((first + alive).tolist(), after[alive].tolist(), strict=True)
        return False

    def _probes(self, end_state: int) -> list[bytes]:
        """Some texts that may come next: single characters, and tokens that begin with them."""
        trie, row = self.vocabulary.trie, self.automaton.next[end_state]
        found: dict[bytes, None] = {}
        for byte in self.automaton.class_bytes[row != DEAD].tolist():
            node = find_node(trie, bytes([byte]))
            if byte >= 128 or node is None:
                continue
            found[bytes([byte])] = None
            low, high = int(trie.low[node]), int(trie.high[node])
            for rank in range(low, high, max(1, (high - low) // PROBES_PER_BYTE)):
                string = self.vocabulary.strings[rank]
                if _is_utf8(string) and self._run(end_state, string) != DEAD:
                    found[string] = None
            if len(found) >= MAX_PROBES:
                break
        return list(found)[:MAX_PROBES]

    def _run(self, byte_state: int, text: bytes) -> int:
        """The state after `text`, its counters left aside; DEAD if it is not allowed."""
        for byte in text:
            byte_state = int(self.automaton.next[byte_state, self.automaton.byte_class[byte]])
        return byte_state


def _is_utf8(text: bytes) -> bool:
    return len(_whole_characters(text)) == len(text)


def _whole_characters(text: bytes) -> bytes:
    """The text up to the first byte that is no UTF-8, or belongs to a character that is cut off."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def force(automaton: ByteAutomaton, rows: Rows, vocabulary: TokenVocabulary) -> tuple[Rows, np.ndarray]:
    """Leaves the one forced token in states that have one.

    Looked at are the states where tokens that were chosen end, the first state, and those after forced tokens. Left
    alone are states inside wide loops, and tokens that share their spelling with others.

    Returns:
        The rows that are left, and int32 [N]: the token each state forces, -1 where there is a choice.
    """
    forced = np.full(automaton.num_states, -1, np.int32)
    text = ForcedText(automaton, vocabulary)
    if vocabulary.encode is None or not text.is_forced.any():
        return rows, forced
    single = rows.single
    may = text.is_forced.copy()
    for group in rows.groups:
        may[group.states] = False
    _, first_id = vocabulary.ranked_ids
    queue = [*np.unique(single.state[~may[single.origin]]).tolist(), automaton.start]  # the last one is taken first
    seen = np.zeros(automaton.num_states, bool)
    num_looks = 0
    while queue and num_looks < MAX_LOOKS:
        state = queue.pop()
        if seen[state] or not may[state]:
            continue
        seen[state] = True
        num_looks += 1
        for token in text.tokens_after(state):
            rank = int(vocabulary.rank_of[token])
            edges = slice(rows.first[state], rows.first[state + 1])
            found = np.flatnonzero(single.where[edges] == rank)
            if forced[state] >= 0 or not may[state] or not len(found) or first_id[rank + 1] - first_id[rank] > 1:
                break
            forced[state], seen[state] = token, True
            state = int(single.state[edges][found[0]])
        if forced[state] < 0:
            targets = single.state[rows.first[state] : rows.first[state + 1]]
            queue += [state, *np.unique(targets).tolist()]
    chosen = forced[single.origin]
    keep = np.flatnonzero((chosen < 0) | (vocabulary.rank_of[chosen] == single.where))
    single = single.take(keep)
    first = np.searchsorted(single.origin, np.arange(automaton.num_states + 1))
    ranges = rows.ranges[forced[rows.ranges[:, 0]] < 0] if len(rows.ranges) else rows.ranges
    return dataclasses.replace(rows, single=single, first=first, ranges=ranges), forced

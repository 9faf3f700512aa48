"""Tokens that a grammar leaves no choice about, as the model's own tokenizer would write them.

Where the automaton allows one byte after another and nothing else, the text is known; its tokens are not quite: the
model might go on with a token that reaches over the end of that text, or have begun it inside one. A model that is fed
tokens it would never write itself gets worse, so only tokens are forced that stay the same whatever comes next. This is
what llguidance's `compute_ff_tokens` does, with one thing more: of what may come next only what the grammar allows counts.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxkv.grammar.automaton import DEAD, ByteAutomaton
from jaxkv.grammar.tables import TokenTables
from jaxkv.grammar.trie import find_node
from jaxkv.grammar.vocabulary import TokenVocabulary

MAX_CONTEXT = 8  # tokens before, with which the forced text is tokenised
MAX_TAIL = 32  # bytes of the longest token that may reach over the end; longer ones are runs of spaces and dashes
MAX_PROBES = 64  # continuations that are tried against the tokenizer
PROBES_PER_BYTE = 8


@dataclasses.dataclass(frozen=True, eq=False)
class ForcedTokens:
    """Answers are kept, so that a grammar in use costs a look-up.

    Args:
        automaton: that `tables` were built from.
        tables: of the grammar.
        vocabulary: with `encode`.
    """

    automaton: ByteAutomaton
    tables: TokenTables
    vocabulary: TokenVocabulary
    _known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False)

    def after(self, state: int, previous: Sequence[int]) -> tuple[int, ...]:
        """Ids that must follow; none if there is a choice at once, or if it is not certain how the text is written.

        Args:
            state: of the tables.
            previous: ids before, of the output or of the prompt if the output is empty; the last few suffice.
        """
        byte_state = int(self.tables.byte_state[state])
        if self.vocabulary.encode is None or not self._single_byte[byte_state] >= 0:
            return ()
        context = tuple(previous[-MAX_CONTEXT:])
        key = state, context
        if key not in self._known:
            self._known[key] = self._find(byte_state, context)
        return self._known[key]

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

    def _find(self, byte_state: int, context: tuple[int, ...]) -> tuple[int, ...]:
        text = _whole_characters(self.forced_bytes(byte_state))
        context = self._readable(context)
        before = b"".join(self.vocabulary.token_bytes(i) for i in context)
        ids = self._encode(before + text)
        if ids is None or tuple(ids[: len(context)]) != context:
            return ()  # the model would have begun this text inside its last token
        end_state = self._run(byte_state, text)
        certain = len(before) + len(text) - self._open_tail(before + text, end_state)
        ends = np.cumsum([len(self.vocabulary.token_bytes(i)) for i in ids])
        ids = ids[: int(np.searchsorted(ends, certain, side="right"))]
        for probe in self._probes(end_state):  # merges may reach farther back than any one token
            longer = self._encode(before + text + probe)
            if longer is None:
                return ()
            same = [a == b for a, b in zip(ids, longer, strict=False)]
            ids = ids[: same.index(False) if False in same else len(same)]
        return tuple(ids[len(context) :])

    def _readable(self, context: tuple[int, ...]) -> tuple[int, ...]:
        """The last tokens of `context` that are whole characters and no special tokens."""
        for start in range(len(context) + 1):
            part = [self.vocabulary.token_bytes(i) for i in context[start:]]
            if all(part) and _is_utf8(b"".join(part)):
                return context[start:]
        return ()

    def _encode(self, text: bytes) -> list[int] | None:
        """Ids of the text; None if the tokenizer does not write just this text (it normalises, or has no tokens)."""
        assert self.vocabulary.encode is not None
        ids = self.vocabulary.encode(text.decode())
        return ids if b"".join(self.vocabulary.token_bytes(i) for i in ids) == text else None

    def _open_tail(self, text: bytes, end_state: int) -> int:
        """Bytes of the longest tail of `text` that a longer token begins with, and goes on as the grammar allows."""
        strings, trie = self.vocabulary.strings, self.vocabulary.trie
        for tail in range(min(len(text), MAX_TAIL), 0, -1):
            node = find_node(trie, text[-tail:])
            if node is not None:
                rests = (strings[rank][tail:] for rank in range(int(trie.low[node]), int(trie.high[node])))
                if any(rest and self._run(end_state, rest) != DEAD for rest in rests):
                    return tail
        return 0

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

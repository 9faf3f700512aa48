"""Steps through token tables on the host: the plain form of what the device does with them."""

from collections.abc import Sequence

import numpy as np

from jaxkv.grammar.tables import TokenTables
from jaxkv.grammar.windows import address


class TokenMatcher:
    """One output's place in a grammar.

    Attributes:
        state: of the tables; 0 after a token that was not allowed, or after an end.
        counter: characters of the counted string that the output is in; means nothing elsewhere.
    """

    def __init__(self, tables: TokenTables) -> None:
        self.tables = tables
        self.state = tables.start
        self.counter = 0

    def advance(self, token_id: int) -> bool:
        """Takes a token; False, and dead from then on, if it is not allowed. An end id is allowed as the last one."""
        if not self.allows(token_id):
            self.state = 0
            return False
        self.state, self.counter = self._after(int(self.tables.class_of[token_id]))
        return True

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that are known to be allowed."""
        for token in token_ids:
            self.state, self.counter = self._after(int(self.tables.class_of[token]))
        assert self.state != 0 or not token_ids, "the output left its grammar"

    def allows(self, token_id: int) -> bool:
        return bool(self._words()[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))

    def mask(self, remaining: int | None = None) -> np.ndarray:
        """bool [V], the tokens allowed next.

        Args:
            remaining: how many tokens may still come, the next one included, the end token not counted. Only tokens
                after which the text can be completed with the rest are allowed then; the end ids whenever it is
                complete. None: any number.
        """
        tables = self.tables
        allowed = np.unpackbits(self._words().view(np.uint8), bitorder="little")[: tables.vocab_size].astype(bool)
        if remaining is None or remaining > tables.slack[self.state]:
            return allowed
        state = tables.next[self.state].astype(np.int64)
        counter = self._counters(np.arange(len(state)))
        in_time = tables.dist_of[address(tables.dist_windows, state, counter)] <= remaining - 1
        in_time &= state != 0
        fits = in_time[tables.class_of]
        if tables.accepting[self.state]:
            fits[list(tables.end_ids)] = True
        return allowed & fits

    @property
    def is_accepting(self) -> bool:
        """The text is complete."""
        return bool(self.tables.accepting[self.state])

    @property
    def dist(self) -> int:
        """Fewest tokens to a complete text, the end token not counted."""
        return int(self.tables.dist_of[address(self.tables.dist_windows, self.state, self.counter)])

    def _words(self) -> np.ndarray:
        tables = self.tables
        return tables.masks[tables.mask_of[address(tables.mask_windows, self.state, self.counter)]]

    def _after(self, token_class: int) -> tuple[int, int]:
        state = int(self.tables.next[self.state, token_class])
        if self.tables.count is None:
            return state, 0
        return state, int(self._counters(np.array([token_class]))[0])

    def _counters(self, classes: np.ndarray) -> np.ndarray:
        """int64, the counter after a token of each class."""
        if self.tables.count is None:
            return np.zeros(len(classes), np.int64)
        effect = self.tables.count[self.state, classes].astype(np.int64)
        return np.where(effect >= 0, self.counter + effect, ~effect)

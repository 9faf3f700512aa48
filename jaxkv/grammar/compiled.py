"""A grammar ready to be used: as tables for the device, or as a matcher for the host."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.grammar.tables import TokenTables


class Matcher(Protocol):
    """One output's place in a grammar on the host. It never sees a stop id, nor a token after one."""

    num_words: int  # of its masks, ceil(V / 32)
    end_ids: tuple[int, ...]  # that its masks allow exactly where the output may end, sorted; they may be none

    @property
    def is_accepting(self) -> bool:
        """The output may end here."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on; "" if it can."""
        ...

    def consume(self, token_id: int) -> None: ...

    def fill(self, mask: np.ndarray) -> None:
        """Writes the tokens allowed next into uint32 [ceil(V / 32)]; other stop ids than `end_ids` are set by others."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class OnDevice:
    """Served by the device's tables."""

    key: str  # equal for equal content
    tables: TokenTables
    _forced: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def forces(self) -> bool:
        """Some state leaves no choice."""
        return bool((self.tables.forced >= 0).any())

    def forced_after(self, state: int) -> tuple[int, ...]:
        """Tokens that must follow a state of the tables, one after the other."""
        if state not in self._forced:
            tables, at, found = self.tables, state, []
            while (token := int(tables.forced[at])) >= 0:
                found.append(token)
                at = int(tables.next[at, tables.class_of[token]])
            self._forced[state] = tuple(found)
        return self._forced[state]

    @property
    def min_tokens(self) -> int:
        """Fewest tokens of a whole output."""
        return self.tables.min_tokens

    def accepts(self, token_ids: Iterable[int]) -> bool:
        """Whether these tokens, stop ids left out, are a whole output."""
        return self.walk(token_ids).is_accepting

    def walk(self, token_ids: Iterable[int]) -> TokenMatcher:
        matcher = TokenMatcher(self.tables)
        for token in token_ids:
            if not matcher.advance(int(token)):
                break
        return matcher


@dataclasses.dataclass(frozen=True, eq=False)
class OnHost:
    """Served by a matcher a row, step by step."""

    key: str
    new_matcher: Callable[[], Matcher]

    @property
    def min_tokens(self) -> int:
        """Not known: 0."""
        return 0

    def accepts(self, token_ids: Iterable[int]) -> bool:
        """Whether these tokens, stop ids left out, are a whole output."""
        matcher = self.start(token_ids)
        return matcher.is_accepting and not matcher.error

    def start(self, token_ids: Iterable[int]) -> Matcher:
        """A matcher after an output."""
        matcher = self.new_matcher()
        for token in token_ids:
            matcher.consume(int(token))
        return matcher


CompiledGrammar = OnDevice | OnHost

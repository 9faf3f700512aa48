"""One completion while it is being made: the only mutable thing about a request.

A request with `n` completions is `n` sequences; child 0 computes the prompt, the others fork from its pages.

One number drives everything: `num_computed` (positions whose K/V a dispatched step computes) catches up with
`num_tokens` (tokens known). A sequence that waits has computed nothing; one that is behind needs a chunk; once its last
chunk is dispatched its row decodes, and `num_computed` may run ahead of what is known by the tokens in flight.

While a sequence has a row, its numbers live in the columns of `Rows`, where a step handles all rows at once.
"""

import copy
import typing

import numpy as np

from jaxkv.cache.prefix_cache import TOKEN_DTYPE
from jaxkv.grammar.compiled import CompiledGrammar, Matcher, OnDevice, OnHost
from jaxkv.grammar.matcher import TokenMatcher
from jaxkv.request import FinishReason, Request


class Columns(typing.Protocol):
    """The part of `Rows` that a placed sequence reads its numbers from."""

    known: np.ndarray
    computed: np.ndarray


class Ending(typing.NamedTuple):
    """How a sequence ended."""

    reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None


class Sequence:
    """One completion of a request.

    Args:
        request: what was asked.
        child: index among the request's completions.
        rank: position among all sequences, best first: (aged priority, arrival number). Never changes.
        max_len: tokens any sequence may hold.
        watched: someone looks at its tokens after every step (streaming, stop strings, log-probabilities).
    """

    def __init__(self, request: Request, child: int, rank: tuple[int, int], max_len: int, watched: bool) -> None:
        self.request = request
        self.child = child
        self.rank = rank
        self.watched = watched
        self.prompt_len = len(request.prompt_token_ids)
        self.max_total_len = min(self.prompt_len + request.params.max_tokens, max_len)
        self.parent: Sequence | None = None  # child 0, whose prompt pages this one may share
        self.forks: list[Sequence] = []  # children that wait until this one's prompt is computed
        self.grammar: CompiledGrammar | None = None  # of its output; None: free, or still being compiled
        self.is_held = False  # its grammar is being compiled: its prompt may be computed, nothing sampled
        self.matcher: Matcher | None = None  # while placed, where the grammar is matched on the host
        self._walk: TokenMatcher | None = None  # after the first `_num_walked` tokens of the output
        self._num_walked = 0
        self.given: list[int] = []  # forced tokens that were not sampled, and not reported yet

        self.rows: Columns | None = None  # where its numbers live while it has a row
        self.row = -1
        # [>= num_tokens]; while placed, a row of `Rows.tokens`
        self.tokens = np.array(request.prompt_token_ids, TOKEN_DTYPE)
        self._num_tokens = self.prompt_len

        # Of each group of layers: page i holds positions [i * page_size, (i + 1) * page_size); the null page stands for
        # those that left the group's window. Empty without a row.
        self.tables: list[list[int]] = []
        self.num_left: list[int] = []  # leading pages of each group that left its window
        self.page_keys: list[bytes] = []  # of its full pages, as far as they were needed
        self.num_published = 0  # leading pages that the prefix cache knows
        self.may_publish = True  # False once its K/V and the cache's namespace differ

        self.last_step_id = -1  # newest step that computed for it, up to when it left its row
        # Leading prompt positions whose scores were delivered, or that nobody wants.
        self.num_scored = max(request.params.prompt_logprobs_from - 1, 0)
        self.cached_tokens: int | None = None  # prompt tokens read from the cache; None before first admission
        self.cache_written_tokens = 0  # prompt tokens in pages that it published first
        self.num_settled = 0  # leading prompt tokens of which it is decided whether they were read or written
        self.num_bypassed = 0
        self.num_preemptions = 0
        self.ending: Ending | None = None

    @property
    def is_placed(self) -> bool:
        """Has a row and pages."""
        return self.rows is not None

    @property
    def held_pages(self) -> list[int]:
        """Its pages in all groups of layers, without those that left a window."""
        return [page for pages, left in zip(self.tables, self.num_left, strict=True) for page in pages[left:]]

    @property
    def is_on_host(self) -> bool:
        """Each of its tokens needs a mask that the host makes from the tokens before."""
        return isinstance(self.grammar, OnHost)

    @property
    def may_jump(self) -> bool:
        """Its grammar may force tokens, and nobody asks how likely each was."""
        return isinstance(self.grammar, OnDevice) and self.grammar.forces and self.request.params.logprobs is None

    def forced_tokens(self) -> tuple[int, ...]:
        """Tokens that must follow the known ones; at least one token remains to be sampled after them."""
        if not self.may_jump:
            return ()
        assert isinstance(self.grammar, OnDevice)
        state, _ = self.place_in_grammar()
        return self.grammar.forced_after(state)[: max(self.max_total_len - 1 - self.num_tokens, 0)]

    def place_in_grammar(self, more: typing.Sequence[int] = ()) -> tuple[int, int]:
        """State and counter after the known output, and `more`."""
        assert isinstance(self.grammar, OnDevice)
        walk = self._walk = self._walk or TokenMatcher(self.grammar.tables)
        start, self._num_walked = self._num_walked, self.num_tokens - self.prompt_len
        walk.follow(self.tokens[self.prompt_len + start : self.num_tokens].tolist())
        if more:
            walk = copy.copy(walk)
            walk.follow(more)
        return walk.state, walk.counter

    def give(self, token_ids: typing.Sequence[int]) -> None:
        """Makes forced tokens known; they are reported with the next sampled one."""
        self.append([*token_ids])
        self.given += token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self._num_tokens if self.rows is None else int(self.rows.known[self.row])

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        if self.rows is None:
            self._num_tokens = value
        else:
            self.rows.known[self.row] = value

    @property
    def num_computed(self) -> int:
        """Leading positions whose K/V are computed by steps dispatched so far (or were reused)."""
        return 0 if self.rows is None else int(self.rows.computed[self.row])

    @property
    def stop_from(self) -> int:
        """First position at which a stop id ends the sequence: `min_tokens` tokens are out before it.

        A grammar lets one through earlier only where nothing else is left; then it counts (behaviour 29).
        """
        return self.prompt_len if self.grammar is not None else self.prompt_len + self.request.params.min_tokens

    @property
    def num_unscored(self) -> int:
        """Prompt positions whose scores are still owed: position i scores token i + 1, so the last one has none."""
        if self.child or self.request.params.prompt_logprobs is None:
            return 0
        return self.prompt_len - 1 - self.num_scored

    @property
    def max_reused(self) -> int:
        """Leading tokens whose K/V may be reused: the last token is always computed, and so is what must be scored."""
        return min(self.num_tokens - 1, self.num_scored) if self.num_unscored > 0 else self.num_tokens - 1

    def note_read(self, num_tokens: int, page_size: int) -> None:
        """It got a row with the K/V of `num_tokens` tokens there. After a preemption only what it never had counts."""
        if self.cached_tokens is None:
            self.cached_tokens = self.num_settled = min(num_tokens, self.prompt_len)
        elif (end := min(num_tokens, self.prompt_len // page_size * page_size)) > self.num_settled:
            self.cached_tokens += end - self.num_settled
            self.num_settled = end

    def note_published(self, new: list[int], num_full: int, page_size: int) -> None:
        """Its first `num_full` pages can be found now; those with the indices `new` could not before."""
        end = min(num_full, self.prompt_len // page_size) * page_size
        if end > self.num_settled:
            self.cache_written_tokens += page_size * sum(self.num_settled <= i * page_size < end for i in new)
            self.num_settled = end

    @property
    def output_token_ids(self) -> np.ndarray:
        """A copy of the known output: int32 [num_output]."""
        return self.tokens[self.prompt_len : self.num_tokens].copy()

    def judge(self, token_ids: list[int]) -> tuple[int, Ending | None]:
        """How many of the tokens that follow the known ones count, and whether the last of these ends the sequence.

        An id that stops counts as output; what a device made after it does not.
        """
        start = self.num_tokens
        for index, token in enumerate(token_ids):
            position = start + index
            if token in self.request.stop_ids and position >= self.stop_from:
                is_users = token in self.request.params.stop_token_ids
                return index + 1, Ending(FinishReason.STOP, token if is_users else None)
            if position + 1 >= self.max_total_len:
                return index + 1, Ending(FinishReason.LENGTH)
        return len(token_ids), None

    def append(self, token_ids: list[int]) -> None:
        """Adds tokens that became known."""
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        if self.rows is None:
            self.tokens = np.concatenate([self.tokens[:start], np.array(token_ids, TOKEN_DTYPE)])
        else:
            self.tokens[start:end] = token_ids
        self.num_tokens = end

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id!r}, {self.child}, {self.num_computed}/{self.num_tokens} tokens)"

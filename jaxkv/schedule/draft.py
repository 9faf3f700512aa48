"""A step's plan while it is made: what it holds so far, and the pages, chunks and rows that are added to it."""

import numpy as np

from jaxkv.config import SchedulerConfig
from jaxkv.grammar_layout import GrammarPlace
from jaxkv.plan import Chunk, PageCopy, PageWrite, RowSetup
from jaxkv.schedule.placement import Placement
from jaxkv.schedule.roster import Roster
from jaxkv.schedule.sequence import Sequence


class Draft:
    """Whoever adds to it also moves on what the roster's rows say.

    Args:
        config: limits.
        roster: who is there.
        step_id: of the step.

    Attributes:
        budgets: tokens left on each data shard.
        chunked: position after its chunk, for each sequence that has one.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, step_id: int) -> None:
        self.config = config
        self.roster = roster
        self._rows = roster.rows
        self._step_id = step_id
        self.placement = Placement(config, roster)
        self.budgets = [config.token_budget] * config.num_shards
        self.setups: list[RowSetup] = []
        self.writes: list[PageWrite] = []
        self.copies: list[PageCopy] = []
        self.chunks: list[Chunk] = []
        self.chunked: dict[Sequence, int] = {}

    def room(self, shard: int) -> int:
        """Tokens the next chunk on a shard may have: what is left of its budget, in whole tiles."""
        room = min(max(self.budgets[shard], 0), self.config.paging.max_chunk)
        return room // self.config.chunk_align * self.config.chunk_align

    def append_page(self, row: int, group: int, pages: list[int], page: int) -> None:
        """Gives a row one more page in a group of layers; `pages` are those it has there."""
        self.writes.append(PageWrite(row, group * self.config.max_pages + len(pages), page))
        pages.append(page)

    def try_take(self, seq: Sequence, num_tokens: int) -> bool:
        """Takes the pages that `num_tokens` tokens lack, in every group; False if there are too few."""
        memory = self.roster.memory_of(seq)
        lacking = [max(memory.num_pages(num_tokens) - len(pages), 0) for pages in seq.tables]
        if sum(lacking) > memory.num_available:
            return False
        new = iter(memory.take(sum(lacking)))
        for group, (pages, num) in enumerate(zip(seq.tables, lacking, strict=True)):
            for _ in range(num):
                self.append_page(seq.row, group, pages, next(new))
        self._rows.capacity[seq.row] = min(map(len, seq.tables)) * self.config.page_size
        return True

    def add_chunk(self, seq: Sequence) -> None:
        """Computes as many of the tokens that `seq` lacks as the budget allows."""
        start, shard = seq.num_computed, self.config.shards.of(seq.row)
        end = min(self.roster.target(seq, start), start + self.room(shard))
        if end == start:
            return
        samples = end == seq.num_tokens < seq.max_total_len
        scores = seq.num_unscored > 0 and end > seq.num_scored and start < seq.prompt_len - 1
        chunk = Chunk(
            row=seq.row,
            start=start,
            token_ids=seq.tokens[start:end].copy(),
            samples=samples,
            prompt_logprobs=seq.request.params.prompt_logprobs if scores else None,
            next_token_ids=_next_token_ids(seq, start, end) if scores else None,
        )
        self.placement.note_chunk(shard, self.roster.memories[shard].keys_filled(seq, start, end))
        self.put_chunk(seq, chunk)
        if samples:
            self._rows.start_decoding(seq.row)

    def put_chunk(self, seq: Sequence, chunk: Chunk) -> None:
        """Adds a chunk and takes its tokens off the budget, in whole tiles."""
        num, align = len(chunk.token_ids), self.config.chunk_align
        self.chunks.append(chunk)
        self.chunked[seq] = chunk.start + num
        self.budgets[self.config.shards.of(chunk.row)] -= -(-num // align) * align
        self._rows.computed[chunk.row] = chunk.start + num
        self._rows.last_step[chunk.row] = self._step_id

    def put_in_row(
        self, seq: Sequence, token_ids: np.ndarray, in_grammar: tuple[GrammarPlace | None, int, int]
    ) -> None:
        """Writes all that the device knows about a row: request, tokens, pages, place in the grammar."""
        request, row = seq.request, seq.row
        place, state, count = in_grammar
        self.setups.append(
            RowSetup(
                row=row,
                params=request.params,
                seed=request.seed,
                child=seq.child,
                prompt_len=seq.prompt_len,
                max_total_len=seq.max_total_len,
                stop_ids=request.stop_ids,
                bad_words_ids=request.bad_words_ids,
                token_ids=token_ids,
                grammar=place,
                grammar_state=state,
                grammar_count=count,
            )
        )
        for group, pages in enumerate(seq.tables):
            start, left = group * self.config.max_pages, seq.num_left[group]
            self.writes.extend(PageWrite(row, start + index, pages[index]) for index in range(left, len(pages)))


def _next_token_ids(seq: Sequence, start: int, end: int) -> np.ndarray:
    """The token after each of positions `[start, end)`; 0 where none is known."""
    next_ids = np.zeros(end - start, np.int32)
    known = seq.tokens[start + 1 : min(end + 1, seq.num_tokens)]
    next_ids[: len(known)] = known
    return next_ids

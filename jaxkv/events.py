"""What the scheduler tells the engine: plain frozen data.

Tokens of decode rows stay arrays over all rows (`Committed`), because at 256 rows one object per row and step would
cost more than everything else the host does. Objects exist only for what is rare or looked at.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxkv.plan import Chunk, StepResult
from jaxkv.request import FinishReason


@dataclasses.dataclass(frozen=True, eq=False)
class NewTokens:
    """Tokens of one completion that became known, in order."""

    request_id: str
    child: int
    token_ids: np.ndarray  # int32 [num >= 1]
    logprobs: np.ndarray | None = None  # float32 [num]: of the chosen tokens
    top_ids: np.ndarray | None = None  # int32 [num, k]
    top_logprobs: np.ndarray | None = None  # float32 [num, k]


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scores of prompt tokens `start + 1 ..`, each given the tokens before it; every position comes exactly once."""

    request_id: str
    start: int  # position of the first scoring token
    logprobs: np.ndarray  # float32 [num]
    top_ids: np.ndarray  # int32 [num, k]
    top_logprobs: np.ndarray  # float32 [num, k]


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
    """A completion ended; it comes once, after the last of its tokens."""

    request_id: str
    child: int
    reason: FinishReason
    token_ids: np.ndarray  # int32 [num_output]: the whole output, a stop id included
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0  # prompt tokens that the request read from the cache
    cache_written_tokens: int = 0  # prompt tokens in pages that the request published first
    num_preemptions: int = 0
    is_last: bool = True  # no completion of this request is left


@dataclasses.dataclass(frozen=True, eq=False)
class Committed:
    """What one step made known. `finished` also holds what ended since the last commit for other reasons."""

    step_id: int
    sequences: np.ndarray  # object [num_decode_rows]: the `Sequence` of each decode row; to read, not to change
    token_ids: np.ndarray  # int32 [num_decode_rows, num_steps]
    counts: np.ndarray  # int [num_decode_rows]: leading tokens that count; what lies beyond was dropped
    watched: np.ndarray  # intp [num]: decode rows with tokens whose sequence is watched
    result: StepResult  # log-probabilities of decode rows, at the same places
    chunks: tuple[tuple[Any, Chunk], ...] = ()  # the `Sequence` of each chunk, to read, and the chunk
    sampled: tuple[NewTokens, ...] = ()  # from chunks that ended a prompt (or a recomputation)
    scores: tuple[Scores, ...] = ()
    admitted: tuple[str, ...] = ()  # ids of requests for which this was the first step
    finished: tuple[Finished, ...] = ()

    def watched_tokens(self) -> Iterator[NewTokens]:
        """New tokens of every watched sequence, `sampled` ones included (also those of unwatched ones)."""
        yield from self.sampled
        yield from map(self.row_tokens, self.watched.tolist())

    def row_tokens(self, index: int) -> NewTokens:
        """New tokens of the decode row at `index`, with log-probabilities if the step has any."""
        seq, count, result = self.sequences[index], int(self.counts[index]), self.result
        cut = lambda array: None if array is None else array[index, :count]  # noqa: E731
        return NewTokens(
            seq.request.request_id,
            seq.child,
            self.token_ids[index, :count],
            cut(result.decode_logprobs),
            cut(result.decode_top_ids),
            cut(result.decode_top_logprobs),
        )

"""The contract between the host tower and the device tower: plain numbers and numpy arrays, nothing else.

A `StepPlan` says what one step computes; the scheduler writes it, the runner executes it, `StepResult` comes back.
A plan is small, deterministic and never changed after it was handed over (behaviour 16), so that several hosts can
run the same plan.

Rows are places in the device-resident row state, `0 .. max_rows - 1`. Where they are split over data shards (`shards`), a
row names its shard, and the pages that stand beside a row are pages of that shard. A row's tokens live on the device: a decode
step starts from the row's own last token and position, so a plan can be dispatched before the previous step's tokens
are known. A row that hit a stop id, its token budget or `max_len` on the device is *done*: it yields no tokens and
writes no K/V in later steps until it is set up again.
"""

import dataclasses
import enum
import typing

import numpy as np

from jaxkv.grammar_layout import GrammarLoad, GrammarPlace
from jaxkv.request import SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class RowSetup:
    """Puts a sequence into a row (first admission, or again after preemption). The row's page list starts empty."""

    row: int
    params: SamplingParams
    seed: int  # uint64
    child: int  # index among the request's n completions
    prompt_len: int  # tokens; generated tokens are those at positions >= prompt_len
    max_total_len: int  # tokens; the row is done when prompt + output reach it: min(prompt_len + max_tokens, max_len)
    stop_ids: tuple[int, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    token_ids: np.ndarray  # int32 [num_tokens]: prompt and output known so far, for penalties and bad words
    grammar: GrammarPlace | None = None  # None: any token may come
    grammar_state: int = 0  # after the output known so far, counted from the grammar's first
    grammar_count: int = 0  # of the counter register, after the same


class PageWrite(typing.NamedTuple):
    """`page_table[row, index] = page`. A tuple, so `np.array(plan.page_writes)` is int [num_writes, 3].

    Each group of layers has its own page table: page i of group g has the index `g * max_pages + i`.
    """

    row: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index is of no use here)
    page: int


class PageAt(typing.NamedTuple):
    """A page of one data shard's pool."""

    shard: int
    page: int


class MoveKind(enum.Enum):
    """What is to be done with a page outside the pool, or with the file that holds it."""

    DOWN = "down"  # read it out of the pool into host memory
    UP = "up"  # write it from host memory into the pool
    DROP = "drop"  # host memory may forget it
    WRITE = "write"  # from host memory to disk
    KEEP = "keep"  # its file is to say that it is kept for longer
    UNLINK = "unlink"  # the disk may forget it
    READ = "read"  # from disk to host memory


class PageNote(typing.NamedTuple):
    """What a file says about its page, besides its content."""

    parent: bytes  # key of the page before it, or the root key
    index: int  # of the page in its prefix
    ttl_s: float | None  # to be kept so many seconds from its last use on


class PageMove(typing.NamedTuple):
    """A page changes its tier; executed in order, before the plan that was made with it is dispatched.

    So reading a page out precedes whatever overwrites it, and what is written into one is there when it is computed with.
    """

    kind: MoveKind
    key: bytes  # names the content, see `prefix_cache`
    at: PageAt | None = None  # of DOWN and UP: where in the pool
    note: PageNote | None = None  # of WRITE and KEEP


class MoveNews(typing.NamedTuple):
    """What became of a READ or WRITE, or that a DOWN was lost on the way."""

    kind: MoveKind
    key: bytes
    is_done: bool


class PageCopy(typing.NamedTuple):
    """Page `target` becomes a copy of page `source`; a tuple as `PageWrite` is."""

    row: int  # whose page `target` is
    source: int
    target: int


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A run of known tokens of one row whose K/V are computed in this step (a prefill chunk)."""

    row: int
    start: int  # position of the first token
    token_ids: np.ndarray  # int32 [chunk_len >= 1]
    samples: bool  # the chunk ends at the last known token: sample the next one, which makes the row a decode row
    prompt_logprobs: int | None = None  # alternatives wanted for each prompt token of the chunk; None: none
    # int32 [chunk_len]: the token that follows each chunk token (what prompt_logprobs scores); the last entry is
    # ignored where the prompt ends. None unless prompt_logprobs is set.
    next_token_ids: np.ndarray | None = None


NO_ROWS = np.zeros(0, np.int32)
NO_ROWS.flags.writeable = False


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: set rows up, extend page tables, copy pages, then compute chunks and decode rows.

    With chunks, every decode row makes one token in the same step (`num_steps == 1`, the *mixed* program). Without,
    decode rows make up to `num_steps` tokens in one device loop.
    """

    step_id: int
    setups: tuple[RowSetup, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()  # done before anything is computed; a target is copied to once
    grammar_loads: tuple[GrammarLoad, ...] = ()  # done before anything is computed
    # Masks of rows whose grammar lives on the host, for this step: each token needs a new one. The next plan may write
    # over them, so whoever dispatches this one takes a copy.
    mask_rows: np.ndarray = dataclasses.field(default_factory=lambda: NO_ROWS)  # int32 [num_masks]
    masks: np.ndarray | None = None  # uint32 [num_masks, ceil(V / 32)]; None: there are none
    chunks: tuple[Chunk, ...] = ()
    decode_rows: np.ndarray = dataclasses.field(default_factory=lambda: NO_ROWS)  # int32 [num_decode_rows], by request
    num_steps: int = 1

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.decode_rows.size


@dataclasses.dataclass(frozen=True, eq=False)
class SampledTokens:
    """The token a chunk sampled at its end, with log-probabilities if the row asked for them."""

    token_ids: np.ndarray  # int32 [num]
    logprobs: np.ndarray | None = None  # float32 [num]: of the chosen tokens
    top_ids: np.ndarray | None = None  # int32 [num, k]
    top_logprobs: np.ndarray | None = None  # float32 [num, k]


@dataclasses.dataclass(frozen=True, eq=False)
class PromptScores:
    """Raw log-probabilities of the tokens after each token of a chunk."""

    logprobs: np.ndarray  # float32 [chunk_len]
    top_ids: np.ndarray  # int32 [chunk_len, k]
    top_logprobs: np.ndarray  # float32 [chunk_len, k]


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """What a step produced, in the plan's order.

    Decode results are arrays over all decode rows, so that the host spends no Python per row. What lies at or beyond
    `decode_counts[i]` in a row is undefined.
    """

    step_id: int
    decode_tokens: np.ndarray  # int32 [num_decode_rows, num_steps]
    decode_counts: np.ndarray  # int32 [num_decode_rows]: tokens made; fewer than num_steps: the row is done
    chunks: tuple[SampledTokens | None, ...] = ()  # one per plan.chunks; None where the chunk does not sample
    prompt_scores: tuple[PromptScores | None, ...] = ()  # one per plan.chunks
    # Log-probabilities of decode rows; None where no row of the step asked. Rows that did not ask hold anything.
    decode_logprobs: np.ndarray | None = None  # float32 [num_decode_rows, num_steps]
    decode_top_ids: np.ndarray | None = None  # int32 [num_decode_rows, num_steps, k]
    decode_top_logprobs: np.ndarray | None = None  # float32 [num_decode_rows, num_steps, k]

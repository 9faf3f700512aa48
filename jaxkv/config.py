"""The scheduler's settings: frozen, keyword-only, with units. `settings.resolve` makes them."""

import dataclasses
import functools

from jaxkv.errors import ConfigError
from jaxkv.paging import Paging
from jaxkv.shards import Shards

EVICTIONS = ("lru", "cost", "adaptive")
DEMOTIONS = ("retained", "all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Pages below the device, see `tiers`; without budgets there are none."""

    host_pages: int = 0  # budget of host memory
    disk_pages: int = 0  # budget of the disk
    max_outgoing: int = 64  # pages in host memory that wait to be written, beside its budget
    max_staged: int = 64  # pages in host memory that were read from disk, beside its budget
    demote: str = "retained"  # which evicted pages go down: those somebody asked to keep or a session holds, or "all"

    def __post_init__(self) -> None:
        for field in ("host_pages", "disk_pages", "max_outgoing", "max_staged"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field}={getattr(self, field)} must be >= 0")
        if self.demote not in DEMOTIONS:
            raise ConfigError(f"demote={self.demote!r} must be one of {', '.join(DEMOTIONS)}")

    @property
    def is_on(self) -> bool:
        return self.host_pages > 0 or self.disk_pages > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarSizes:
    """Room for the tables of grammars that live on the device, over all rows; every device holds all of it.

    Raises:
        ConfigError: a value is impossible.
    """

    num_grammars: int = 8  # at once
    num_states: int = 4096
    num_transitions: int = 1 << 18
    num_lookups: int = 1 << 14
    num_masks: int = 512

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"grammars.{field.name}={getattr(self, field.name)} must be >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Everything the host tower needs; all numbers are final.

    Raises:
        ConfigError: a value is impossible; the message names value and limit.
    """

    max_len: int  # tokens a sequence may hold, prompt and output
    max_rows: int  # sequences running at once, over all data shards
    page_size: int  # tokens a page holds, of one group of layers
    num_pages: int  # pages of a data shard, including its null page 0
    token_budget: int  # prompt tokens that a data shard computes in one step, beside its decode rows
    chunk_align: int = 1  # a chunk occupies a multiple of this many tokens of the budget (query tile of the kernels)
    decode_steps: int = 1  # tokens a decode row makes in one device loop when nothing waits
    prefix_cache: bool = True
    eviction: str = "lru"  # which cached page goes first, see `eviction` and `adaptive_eviction`
    attention_len: int = (
        4096  # tokens of context at which attention costs what the weights do; for "cost" and "adaptive"
    )
    max_bypass: int = 16  # requests that may overtake a waiting one that does not fit yet
    steps_per_priority_level: int = 64  # steps of waiting that count as one priority level
    reserve_steps: int = 8  # decode steps of page growth kept free when a sequence is admitted next to running ones
    tiers: TierConfig = TierConfig()  # host memory and disk below the pool
    num_shards: int = 1  # data shards; each has its share of the rows, and pages of its own
    grammars: GrammarSizes = GrammarSizes()
    # Of each group of layers, whose pages hold K/V of its layers only: tokens that they see; None: all that came before.
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        for field in (
            "max_len", "max_rows", "page_size", "token_budget", "chunk_align", "decode_steps", "num_shards",
            "attention_len",
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be >= 1")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"windows={self.windows} must name at least one group, and each window be >= 1 or None")
        if self.has_windows and self.tiers.is_on:
            raise ConfigError(f"windows={self.windows}: pages that left a window cannot come back from lower tiers")
        for field in ("max_bypass", "reserve_steps"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field}={getattr(self, field)} must be >= 0")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction={self.eviction!r} must be one of {', '.join(EVICTIONS)}")
        if self.steps_per_priority_level < 1:
            raise ConfigError(f"steps_per_priority_level={self.steps_per_priority_level} must be >= 1")
        if self.num_pages < 2:
            raise ConfigError(f"num_pages={self.num_pages} must be >= 2: page 0 is the null page")
        if self.max_rows % self.num_shards:
            raise ConfigError(
                f"max_rows={self.max_rows} cannot be split over data={self.num_shards} shards evenly; use a multiple of "
                f"{self.num_shards}"
            )
        if self.token_budget < self.chunk_align:
            raise ConfigError(
                f"token_budget={self.token_budget} leaves no room for one chunk tile; raise it to at least {self.chunk_align}"
            )

    @property
    def pool_name(self) -> str:
        """What a sequence's pages must fit into, for errors."""
        return "the whole pool" if self.num_shards == 1 else f"each of the pool's {self.num_shards} data shards"

    @property
    def has_windows(self) -> bool:
        """Pages leave windows while their sequence runs."""
        return any(window is not None for window in self.windows)

    @property
    def max_pages(self) -> int:
        """Pages of a group that a row may have."""
        return -(-self.max_len // self.page_size)

    @functools.cached_property
    def paging(self) -> Paging:
        """How many pages tokens take."""
        return Paging(page_size=self.page_size, windows=self.windows, token_budget=self.token_budget)

    @property
    def shards(self) -> Shards:
        return Shards(self.num_shards, self.max_rows // self.num_shards)

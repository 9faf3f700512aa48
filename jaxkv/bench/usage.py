"""How well KV memory was used over a run: one record a step, from a replay or from the real scheduler."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsageRecord:
    """The memory of one step, in tokens."""

    num_held: int  # tokens whose K and V exist, or are written in this step
    num_future: int  # reserved, and will be used before the request that reserved it ends
    num_reserved: int  # all that nobody else can take: held, future, and what will never be used
    num_running: int  # requests in this step
    num_waiting: int  # requests that did not get in

    def __post_init__(self) -> None:
        assert self.num_held >= 0 and self.num_future >= 0
        assert self.num_held + self.num_future <= self.num_reserved, self


@dataclasses.dataclass(kw_only=True)
class Usage:
    """The records of one run over a memory of `capacity` tokens.

    Means are over steps. The vLLM paper's figures 2 and 13 are of a loaded system, so means over the whole memory, and of
    requests running at once, take the steps in which somebody waited (all steps, when nobody ever did).
    """

    name: str
    capacity: int  # tokens
    records: list[UsageRecord] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens computed again after preemption

    @property
    def loaded(self) -> list[UsageRecord]:
        """The steps in which somebody waited, or all when nobody ever did."""
        return [record for record in self.records if record.num_waiting] or self.records

    @property
    def num_steps(self) -> int:
        return len(self.records)

    @property
    def held_of_reserved(self) -> float:
        """Tokens held / tokens reserved, both summed over all steps: what a token's reservation is worth."""
        return _ratio(sum(record.num_held for record in self.records), sum(r.num_reserved for r in self.records))

    @property
    def mean_running(self) -> float:
        """Requests running at once, mean over loaded steps: figure 13."""
        return _ratio(sum(record.num_running for record in self.loaded), len(self.loaded))

    @property
    def max_running(self) -> int:
        return max((record.num_running for record in self.records), default=0)

    def held_of_reserved_over_time(self) -> list[float]:
        """Tokens held / tokens reserved in each step; 1 when nothing is reserved."""
        return [_ratio(record.num_held, record.num_reserved, empty=1.0) for record in self.records]

    def shares_of_memory(self) -> dict[str, float]:
        """Where the memory went in loaded steps, as shares that sum to 1: figure 2.

        `held` are tokens; `future` is reserved and used later; `never_used` is reserved and not used (internal
        fragmentation); `free` could not be given to those that waited (external fragmentation).
        """
        whole = self.capacity * len(self.loaded)
        held = sum(record.num_held for record in self.loaded)
        future = sum(record.num_future for record in self.loaded)
        reserved = sum(record.num_reserved for record in self.loaded)
        return {
            "held": _ratio(held, whole),
            "future": _ratio(future, whole),
            "never_used": _ratio(reserved - held - future, whole),
            "free": _ratio(whole - reserved, whole, empty=1.0),
        }

    def summary(self) -> dict[str, Any]:
        """Returns the run's numbers, ready for JSON; shares in [0, 1]."""
        return {
            "name": self.name,
            "held_of_reserved": round(self.held_of_reserved, 4),
            "shares_of_memory": {key: round(value, 4) for key, value in self.shares_of_memory().items()},
            "mean_running": round(self.mean_running, 2),
            "max_running": self.max_running,
            "num_steps": self.num_steps,
            "num_loaded_steps": sum(record.num_waiting > 0 for record in self.records),
            "num_preemptions": self.num_preemptions,
            "num_recomputed": self.num_recomputed,
        }


def _ratio(part: float, whole: float, *, empty: float = 0.0) -> float:
    return part / whole if whole else empty

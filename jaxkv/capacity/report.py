"""From what was asked to what `jaxkv plan` prints, as plain data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.capacity.chips import Chip
from jaxkv.capacity.geometry import Bound, Layout, bound, tensor_sizes
from jaxkv.models.quant import SCHEMES
from jaxkv.ops import XLA
from jaxkv.paging import Paging

MEMORY_FRACTION = 0.9  # of what weights leave: the engine's default share for pages on accelerators


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory of one device, bytes."""

    usable: int
    weights: int
    state: int  # row state
    temp: int  # of the greediest step program
    page: int  # one page, over all its layers

    @property
    def free(self) -> int:
        """What weights leave; negative if they do not fit."""
        return self.usable - self.weights

    @property
    def for_pages(self) -> int:
        """The engine's share, or less where row state and temporaries need more than the rest."""
        return max(min(int(self.free * MEMORY_FRACTION), self.free - self.state - self.temp), 0)

    @property
    def num_pages(self) -> int:
        """Pages of a data shard, the null page not counted."""
        return max(self.for_pages // self.page - 1, 0)

    def missing(self, num_pages: int) -> int:
        """Bytes that a pool of so many pages lacks; 0 if it fits."""
        needed = (num_pages + 1) * self.page
        by_share = -(-needed * 10 // 9) if needed else 0
        return max(self.weights + max(by_share, needed + self.state + self.temp) - self.usable, 0)


def rows_at(num_pages: int, paging: Paging, data: int, context_len: int) -> int:
    """Rows of `context_len` tokens whose pages fit at once, over all data shards."""
    return num_pages // paging.num_needed(context_len) * data


@dataclasses.dataclass(frozen=True)
class BoundAt:
    """The roofline at one batch."""

    rows: int
    context_len: int
    bound: Bound

    @property
    def tokens_s(self) -> float:
        """Over all rows: an upper bound."""
        return self.rows / self.bound.step_s


def bounds(layout: Layout, chip: Chip, rows: list[int], context_len: int) -> list[BoundAt]:
    """The roofline at each number of rows."""
    return [BoundAt(n, context_len, bound(layout.decode(n, context_len), chip, layout.dtype_bytes)) for n in rows]


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, max(most, 1)]


@dataclasses.dataclass(frozen=True)
class Advice:
    """A setting that would fit."""

    setting: str
    effect: str


def advise(
    layout: Layout,
    budget: Budget,
    *,
    num_devices: int,
    page_size: int,
    max_len: int,
    dtypes: Mapping[str, int],
    kv_dtypes: Mapping[str, int],
) -> list[Advice]:
    """The nearest settings that hold one row of `max_len` tokens, nearest first; nothing if none does.

    Args:
        layout: what does not fit.
        budget: its memory; row state and temporaries are taken to stay as they are.
        num_devices: of the topology.
        page_size: tokens a page.
        max_len: tokens of a row.
        dtypes: name -> bytes of the dtypes that weights may have.
        kv_dtypes: the same for K/V.
    """
    paging = layout.paging(page_size, XLA.token_budget)
    pages = paging.num_needed(max_len)

    def budget_of(other: Layout) -> Budget:
        return dataclasses.replace(budget, weights=other.weight_bytes, page=other.page_bytes(page_size))

    def fits(other: Layout) -> bool:
        return budget_of(other).missing(pages) == 0

    found = []
    shorter = paging.longest(budget.num_pages, max_len)
    if shorter >= page_size:
        found.append(Advice(f"--max-len {shorter}", "one row of that length fits"))
    for tensor in tensor_sizes(layout.cfg, num_devices):
        if layout.tensor < tensor and fits(other := layout.with_tensor(tensor)):
            tokens = budget_of(other).num_pages // len(paging.windows) * page_size
            found.append(Advice(f"--tensor {tensor}", f"{tokens:,} tokens of cache for each of its data shards"))
            break
    others = [
        (f"--kv-dtype {name}", dataclasses.replace(layout, kv_dtype_bytes=size))
        for name, size in kv_dtypes.items()
        if size < layout.kv_dtype_bytes
    ]
    others += [(f"--quant {name}", dataclasses.replace(layout, quant=name)) for name in SCHEMES if layout.quant is None]
    others += [
        (f"--dtype {name}", dataclasses.replace(layout, dtype_bytes=size, kv_dtype_bytes=size))
        for name, size in dtypes.items()
        if size < layout.dtype_bytes
    ]
    for setting, smaller in others:
        if fits(smaller):
            tokens = budget_of(smaller).num_pages // len(paging.windows) * page_size
            found.append(Advice(setting, f"{tokens:,} tokens of cache"))
            break
    return found


def larger_slice(layout: Layout, budget: Budget, chip: Chip, *, page_size: int, max_len: int) -> Advice | None:
    """The fewest devices of the same chip that hold the model, where the topology itself is too small."""
    pages = layout.paging(page_size, XLA.token_budget).num_needed(max_len)
    for tensor in tensor_sizes(layout.cfg, layout.cfg.num_heads):
        other = layout.with_tensor(tensor)
        wanted = dataclasses.replace(budget, weights=other.weight_bytes, page=other.page_bytes(page_size))
        if wanted.missing(pages) == 0:
            num_chips = -(-tensor // chip.devices_per_chip)
            return Advice(f"a topology of {num_chips} or more {chip.name} chips", f"with --tensor {tensor}")
    return None


def to_json(value: Any) -> Any:
    """Dataclasses and their computed properties as dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        properties = {
            name: getattr(value, name) for name, each in vars(type(value)).items() if isinstance(each, property)
        }
        return to_json(fields | properties)
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return value

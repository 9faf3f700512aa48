"""From what `LLM.load` was asked to the numbers everything downstream works with: "auto" is resolved here, once."""

import dataclasses
import logging

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv import ops
from jaxkv.config import DEMOTIONS, EVICTIONS, GrammarSizes, SchedulerConfig, TierConfig
from jaxkv.device import kv_pool, page_transfer
from jaxkv.device.automata import mask_width
from jaxkv.device.batch import Buckets, make_buckets
from jaxkv.device.kv_pool import PoolSpec
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.grammar_layout import STATE_COLUMNS
from jaxkv.models.config import ModelConfig
from jaxkv.models.groups import LayerGroups, group_layers, one_group
from jaxkv.ops import Backend
from jaxkv.sharding import DATA, TENSOR

log = logging.getLogger(__name__)


DISK_BYTES = 10 << 30  # budget of a model's pages on disk, unless given
FILE_OVERHEAD = 1056  # bytes of a page's file beside the page, see `tier_files`
OUTGOING_BYTES = 512 << 20  # of pages in host memory that wait to be written, beside its budget

# What `kv_dtype` may be besides "auto". float8 halves the pool of a bf16 model; K and V are stored as they are, without
# scales, and what exceeds 448 saturates. int8 would need scales per model, which nothing measures yet.
KV_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float8_e4m3fn": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings as the caller gives them; None means "choose for me"."""

    max_len: int | None = None  # tokens of prompt and output; None: what the model was trained for
    max_rows: int | None = None  # sequences running at once, over all data shards; None: by platform, on each
    kv_dtype: str = "auto"  # of K/V in the pool: a name in KV_DTYPES; "auto" is that of the activations
    page_size: int = 16  # tokens per page
    num_pages: int | None = None  # over all data shards; None: from memory_fraction
    memory_fraction: float | None = None  # share of free memory for pages; None: by platform
    token_budget: int | None = None  # prompt tokens that a data shard computes in a step; None: by platform
    decode_steps: int | None = None  # tokens a row makes in one device loop; None: by platform
    prefix_cache: bool = True  # reuse pages of equal prefixes
    eviction: str = "lru"  # which cached pages go first: "lru", "cost" or "adaptive"
    host_cache_bytes: int = 0  # of host memory for pages that the pool gave up
    cache_dir: str | None = None  # folder for pages that host memory gave up; None: they are lost
    disk_cache_bytes: int | None = None  # of pages of this model there; None: 10 GiB
    demote: str = "retained"  # which pages go down: those somebody asked to keep, or "all"
    overlap: bool = True  # dispatch a step before the previous one was read
    grammar_bytes: int | None = None  # of each device for the tables of structured outputs; None: by the vocabulary
    seed: int = 0  # base of the seeds of requests that give none

    def __post_init__(self) -> None:
        for field in ("max_len", "max_rows", "page_size", "num_pages", "token_budget", "decode_steps", "grammar_bytes"):
            value = getattr(self, field)
            if value is not None and (not _is_whole(value) or value < 1):
                raise ConfigError(f"{field}={value!r} must be a whole number >= 1")
        for field in ("prefix_cache", "overlap"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field}={getattr(self, field)!r} must be True or False")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ConfigError(f"kv_dtype={self.kv_dtype!r} is not one of auto, {', '.join(KV_DTYPES)}")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction={self.eviction!r} must be one of {', '.join(EVICTIONS)}")
        _check_tiers(self)
        if not _is_whole(self.seed) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be a whole number >= 0")
        if self.num_pages is not None and self.memory_fraction is not None:
            raise ConfigError("give num_pages or memory_fraction, not both: each decides the size of the pool")
        fraction = self.memory_fraction
        if fraction is not None and not ((isinstance(fraction, float) or _is_whole(fraction)) and 0 < fraction <= 1):
            raise ConfigError(f"memory_fraction={fraction!r} must be in (0, 1]")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # max_rows=True is a slip, not one row


def _check_tiers(config: EngineConfig) -> None:
    """Raises ConfigError where lower tiers are asked for that cannot be."""
    for field in ("host_cache_bytes", "disk_cache_bytes"):
        value = getattr(config, field)
        if value is not None and (not _is_whole(value) or value < 0):
            raise ConfigError(f"{field}={value!r} must be a whole number >= 0")
    if config.demote not in DEMOTIONS:
        raise ConfigError(f"demote={config.demote!r} must be one of {', '.join(DEMOTIONS)}")
    if config.disk_cache_bytes is not None and config.cache_dir is None:
        raise ConfigError(f"disk_cache_bytes={config.disk_cache_bytes} needs a folder; give cache_dir")
    if not config.prefix_cache and (config.host_cache_bytes or config.cache_dir is not None):
        raise ConfigError("host_cache_bytes and cache_dir need the prefix cache; load with prefix_cache=True")


def resolve_tiers(config: EngineConfig, pool: PoolSpec, max_len: int) -> TierConfig:
    """Budgets in pages.

    Raises:
        ConfigError: a budget is smaller than a page.
    """
    disk_bytes = 0
    if config.cache_dir is not None:
        disk_bytes = DISK_BYTES if config.disk_cache_bytes is None else config.disk_cache_bytes
    page_bytes = page_transfer.page_bytes(pool)
    for field, budget in (("host_cache_bytes", config.host_cache_bytes), ("disk_cache_bytes", disk_bytes)):
        if 0 < budget < page_bytes + FILE_OVERHEAD:
            raise ConfigError(
                f"{field}={budget} holds no page of {page_bytes + FILE_OVERHEAD:,} bytes; raise it, or give 0"
            )
    return TierConfig(
        host_pages=config.host_cache_bytes // page_bytes,
        disk_pages=disk_bytes // (page_bytes + FILE_OVERHEAD),
        max_outgoing=max(OUTGOING_BYTES // page_bytes, 16),
        max_staged=-(-max_len // pool.page_size),
        demote=config.demote,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """Final numbers."""

    scheduler: SchedulerConfig
    pool: PoolSpec
    buckets: Buckets
    backend: Backend  # with the query tile that fits the token budget


def resolve(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, mesh: Mesh, backend: Backend) -> Resolved:
    """Chooses everything that was left open.

    Raises:
        ConfigError: settings contradict each other or cannot be split over the mesh's data shards.
        CapacityError: memory does not hold even one page for a prompt.
    """
    data = mesh.shape[DATA]
    max_len = config.max_len or model.max_len
    if max_len > model.max_len:
        log.warning(
            "max_len=%d exceeds the %d positions the model was trained for: rotary positions go on as they are, and what "
            "is written beyond may make little sense",
            max_len, model.max_len,
        )  # fmt: skip
    kv_dtype = dtype if config.kv_dtype == "auto" else jnp.dtype(KV_DTYPES[config.kv_dtype])
    backend = ops.fit(backend, _shapes(config, model, dtype, kv_dtype, mesh, max_len))
    num_rows = _share("max_rows", config.max_rows, data) or backend.max_rows  # on a shard
    token_budget = config.token_budget or backend.token_budget
    query_tile = _query_tile(token_budget, backend)
    backend = dataclasses.replace(backend, query_tile=query_tile)
    groups = _groups(config, model, max_len)
    spec = PoolSpec(
        num_layers=groups.size,
        num_pages=2,
        groups=groups,
        num_kv_heads=model.num_kv_heads,
        page_size=config.page_size,
        head_dim=model.head_dim,
        dtype=kv_dtype,
        storage_dtype=backend.storage_dtype(kv_dtype),
        storage_shape=backend.storage_shape,
        pack=backend.pack,
        unpack=backend.unpack,
        kv_copies=model.kv_copies,
        num_shards=data,
    )
    if model.kv_copies > 1:
        log.info(
            "tensor=%d: each of %d KV heads is stored %d times",
            mesh.shape[TENSOR], model.num_kv_heads // model.kv_copies, model.kv_copies,
        )  # fmt: skip
    scheduler = SchedulerConfig(
        max_len=max_len,
        max_rows=num_rows * data,
        page_size=spec.page_size,
        num_pages=2,
        windows=groups.windows,
        token_budget=token_budget,
        chunk_align=query_tile,
        decode_steps=config.decode_steps or backend.decode_steps,
        prefix_cache=config.prefix_cache,
        eviction=config.eviction,
        attention_len=_attention_len(model),
        num_shards=data,
        grammars=grammar_sizes(config.grammar_bytes, model.vocab_size),
    )
    most = num_rows * scheduler.paging.num_needed(max_len) + 1
    spec = dataclasses.replace(spec, num_pages=_num_pages(config, spec, model.num_layers, most, mesh, backend))
    fitted = scheduler.paging.longest(spec.num_pages - 1, max_len)
    if fitted < max_len:
        log.warning("max_len=%d does not fit into %d pages: lowered to %d", max_len, spec.num_pages - 1, fitted)
    scheduler = dataclasses.replace(
        scheduler,
        max_len=fitted,
        num_pages=spec.num_pages,
        decode_steps=min(scheduler.decode_steps, fitted),
        tiers=resolve_tiers(config, spec, fitted),
    )
    buckets = make_buckets(
        max_rows=num_rows,
        token_budget=token_budget,
        query_tile=query_tile,
        max_pages=scheduler.max_pages * groups.num,
        max_len=fitted,
    )
    if scheduler.tiers.is_on:
        moves = page_transfer.sizes(page_transfer.page_bytes(spec))
        buckets = dataclasses.replace(buckets, page_moves=moves)
    return Resolved(scheduler=scheduler, pool=spec, buckets=buckets, backend=backend)


def _groups(config: EngineConfig, model: ModelConfig, max_len: int) -> LayerGroups:
    """How layers share pages. What left a window cannot go to lower tiers, so with these all layers are one group."""
    groups = group_layers(model.windows, max_len)
    if groups.windows == (None,):
        return groups
    if config.host_cache_bytes or config.cache_dir is not None:
        log.info("host_cache_bytes or cache_dir: K/V that left the sliding windows are kept, as whole pages go down")
        return one_group(model.num_layers)
    log.info(
        "sliding windows: pages hold %d of %d layers, in %d groups with windows %s; what left them is given back",
        groups.size, model.num_layers, groups.num, groups.windows,
    )  # fmt: skip
    return groups


def grammar_sizes(num_bytes: int | None, vocab_size: int) -> GrammarSizes:
    """Room for grammars in `num_bytes` of a device.

    Measured on 148 public schemas with 128k tokens: the median grammar has 700 states and 149 masks (2.9 MB in all), the
    ninth of ten 3,900 and 327 (6.6 MB). Half of the memory goes to masks, most of the rest to token classes and
    transitions.

    Args:
        num_bytes: None is what 2,048 masks take, three times: 100 MB for a vocabulary of 128k.
        vocab_size: width of the logits.

    Raises:
        ConfigError: it is too little for any grammar.
    """
    mask_bytes = mask_width(vocab_size) * 4
    total = num_bytes if num_bytes is not None else max(3 * 2048 * mask_bytes, 16 << 20)
    least = 64 * mask_bytes + 2 * vocab_size + (1 << 20)
    if total < least:
        raise ConfigError(
            f"grammar_bytes={total} is too little for one grammar of this vocabulary; give at least {least}"
        )
    num_grammars = min(max(total // 6 // (2 * vocab_size), 1), 64)
    rest = total // 2 - num_grammars * 2 * vocab_size
    return GrammarSizes(
        num_grammars=num_grammars,
        num_masks=min(total // 2 // mask_bytes, 1 << 16),
        num_states=max(rest // 8 // (4 * STATE_COLUMNS), 1024),
        num_lookups=max(rest // 8 // 4, 1024),
        num_transitions=max(rest * 3 // 4 // 4, 1 << 16),
    )


def _attention_len(model: ModelConfig) -> int:
    """Tokens of context at which attention takes as many operations as a layer's weights: 2 a weight, 4 H D a token."""
    ffn = model.ffn * (model.experts.per_token if model.experts else 1)  # what a token is computed with
    num_weights = model.embed * (2 * (model.num_heads + model.num_kv_heads) * model.head_dim + 3 * ffn)
    return max(num_weights // (2 * model.num_heads * model.head_dim), 1)


def _shapes(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, kv_dtype: jnp.dtype, mesh: Mesh, max_len: int
) -> ops.Shapes:
    """What one device's kernels work on."""
    tensor = mesh.shape[TENSOR]
    return ops.Shapes(
        num_heads=model.num_heads // tensor,
        num_kv_heads=model.num_kv_heads // tensor,
        head_dim=model.head_dim,
        page_size=config.page_size,
        max_pages=-(-max_len // config.page_size),
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def _share(field: str, value: int | None, data: int) -> int | None:
    """A data shard's part of a setting."""
    if value is not None and value % data:
        below = value // data * data
        raise ConfigError(
            f"{field}={value} cannot be split over data={data} shards evenly; use "
            f"{f'{below} or ' if below else ''}{below + data}"
        )
    return None if value is None else value // data


def _query_tile(token_budget: int, backend: Backend) -> int:
    """The back end's tile, halved until one fits."""
    tile = backend.query_tile
    while tile > token_budget:
        tile //= 2
    return tile


def _num_pages(config: EngineConfig, spec: PoolSpec, num_layers: int, most: int, mesh: Mesh, backend: Backend) -> int:
    """A data shard's pages, the null page included.

    Explicit, or what the memory budget holds; never more than every row at `max_len` could use. Given pages are meant to
    hold all layers: there are as many more of a group's layers only.

    Args:
        num_layers: of the model.
        most: that rows could use.
    """
    given = _share("num_pages", config.num_pages, spec.num_shards)
    if given is not None:
        return max(given * num_layers // spec.num_layers, spec.num_groups) + 1
    free = kv_pool.free_memory_bytes(mesh)
    fraction = config.memory_fraction or backend.memory_fraction
    budget = int(free * fraction)
    num_pages = min(budget // spec.page_bytes // spec.num_shards, most)
    log.info(
        "page pool: %s bytes free x %s = %s, / %s bytes a page (%d tokens x %s bytes) = %d pages",
        f"{free:,}", fraction, f"{budget:,}", f"{spec.page_bytes:,}", spec.page_size, f"{spec.token_bytes:,}",
        budget // spec.page_bytes,
    )  # fmt: skip
    if num_pages < 1 + spec.num_groups:
        raise CapacityError(
            f"memory_fraction={fraction} of {free:,} free bytes is {budget:,}, less than two pages of "
            f"{spec.page_bytes:,} bytes for each of {spec.num_shards} data shard(s); raise memory_fraction"
        )
    return num_pages

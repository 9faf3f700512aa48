"""The body of the TPU kernel: what one query tile does, page copies and all. `tpu` calls it and prepares its operands.

Axis letters as in `tpu`, and C: keys of a key tile (`tile_pages` pages).

The pages of a key tile are copied into one half of `kv` while the other half is attended to. The last copy that a query
tile starts is the next one's first, so that the memory does not idle between decode rows of few pages each.

New K/V are merged into the copy in VMEM, attended to from there and copied out from there: they are never read back.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

NEG_INF = -1e30  # finite, as in `reference`: an all-masked tile must not produce NaN

Ref = Any  # pallas has no public type for what a kernel gets
Slice = pl.Slice | slice  # what pl.ds gives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """What the kernel is compiled for, beyond the shapes of its operands."""

    page_size: int  # S
    tile_pages: int  # pages of a key tile: C = tile_pages * S
    groups: int  # G
    heads_together: int  # k: KV heads whose matmuls are issued together; divides K
    unit: int  # tokens of a write unit, the fewest that can be copied to the pool; divides S
    scale: float
    kv_scale: tuple[float, float]
    soft_cap: float | None
    has_window: bool
    dot_dtype: jnp.dtype  # of the matmuls' operands


@dataclasses.dataclass(frozen=True)
class Refs:
    """Operands and scratch in the order in which Pallas passes them, `sinks` aside."""

    start: Ref  # SMEM int32 [N]
    num_tokens: Ref  # SMEM int32 [N]
    scalars: Ref  # SMEM int32 [2]: first page of the layer, window
    table: Ref  # SMEM int32 [1, 1, M]: of this query tile
    next_table: Ref  # SMEM int32 [1, 1, M]: of the next one
    q: Ref  # VMEM [1, K, GQ, lanes]
    new: Ref  # VMEM [1, planes, K, U, unit, lanes]: new K/V as in the pool; [1, planes, K, 1, 1, lanes] if Q = 1
    pool_in: Ref  # unused: the same memory as `pool`, but not in the interpreter
    out: Ref  # VMEM [1, K, GQ, lanes]
    pool: Ref  # HBM [L * P, planes, K, S, lanes]
    kv: Ref  # VMEM [2, planes, K, tile_pages, S, lanes]: the two halves
    peak: Ref  # VMEM float32 [K, GQ, 1]: largest score so far
    total: Ref  # VMEM float32 [K, GQ, 1]: sum of weights
    acc: Ref  # VMEM float32 [K, GQ, lanes]: weighted sum of values
    half: Ref  # SMEM int32 [1]: where this query tile's first key tile is
    read_done: Ref  # a DMA semaphore per half
    write_done: Ref
    sinks: Ref = None  # VMEM float32 [K, GQ, 1]


@dataclasses.dataclass(frozen=True)
class Span:
    """Which tokens and pages a query tile is about; all int32 []."""

    start: jax.Array  # position of its first token
    end: jax.Array  # of its last one, plus one
    first_page: jax.Array  # of those that it sees: an index into its table
    end_page: jax.Array
    num_key_tiles: jax.Array

    @classmethod
    def of(cls, static: Static, refs: Refs, n: jax.Array) -> "Span":
        start = refs.start[n]
        end = start + refs.num_tokens[n]
        first = jnp.maximum(start - refs.scalars[1] + 1, 0) // static.page_size if static.has_window else jnp.int32(0)
        end_page = pl.cdiv(end, static.page_size)
        return cls(start, end, first, end_page, pl.cdiv(end_page - first, static.tile_pages))

    def key_tile(self, static: Static, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First page of key tile `t` (an index into the table) and how many pages it has."""
        page = self.first_page + t * static.tile_pages
        return page, jnp.minimum(self.end_page - page, static.tile_pages)


def attend_tile(static: Static, *refs: Ref) -> None:
    """Kernel body for grid step n: writes K/V of query tile n and attends."""
    r = _named(refs)
    n = pl.program_id(0)

    @pl.when(n == 0)
    def _():
        r.half[0] = 0

    @pl.when(r.num_tokens[n] == 0)
    def _():
        r.out[...] = jnp.zeros_like(r.out)

    @pl.when(r.num_tokens[n] > 0)
    def _():
        _for_heads(static, r, lambda heads: _begin(r, heads))
        _walk_key_tiles(static, r, n)
        _for_heads(static, r, lambda heads: _end(static, r, heads))


def _named(refs: tuple[Ref, ...]) -> Refs:
    names = [field.name for field in dataclasses.fields(Refs)][:-1]
    if len(refs) > len(names):
        names.insert(names.index("pool_in"), "sinks")
    return Refs(**dict(zip(names, refs, strict=True)))


def _for_heads(static: Static, r: Refs, body: Callable[[Slice], None]) -> None:
    """Calls `body` with `heads_together` KV heads at a time: all heads written out would compile for seconds."""
    k = static.heads_together
    jax.lax.fori_loop(0, r.acc.shape[0] // k, lambda i, _: body(pl.ds(i * k, k)), None)


def _begin(r: Refs, heads: Slice) -> None:
    r.acc[heads] = jnp.zeros_like(r.acc[heads])
    if r.sinks is None:
        r.peak[heads] = jnp.full_like(r.peak[heads], NEG_INF / 2)  # above NEG_INF: masked keys weigh exp(-5e29) = 0
        r.total[heads] = jnp.zeros_like(r.total[heads])
    else:  # a key that comes first and adds nothing
        r.peak[heads] = r.sinks[heads]
        r.total[heads] = jnp.ones_like(r.total[heads])


def _end(static: Static, r: Refs, heads: Slice) -> None:
    total = r.total[heads]
    out = r.acc[heads] * static.kv_scale[1] / jnp.where(total == 0, 1.0, total)
    r.out[0, heads] = out.astype(r.out.dtype)


def _walk_key_tiles(static: Static, r: Refs, n: jax.Array) -> None:
    here = Span.of(static, r, n)
    following = jnp.minimum(n + 1, pl.num_programs(0) - 1)
    after = Span.of(static, r, following)
    has_next = (n + 1 < pl.num_programs(0)) & (r.num_tokens[following] > 0)
    must_wait = _reads_what_was_written(static, r, here, after)
    first_half = r.half[0]

    @pl.when((n == 0) | (r.num_tokens[jnp.maximum(n - 1, 0)] == 0))
    def _():  # nobody has started it
        _start_reads(static, r, r.table, here, jnp.int32(0), first_half)

    def visit(t: jax.Array, _: None) -> None:
        half = (first_half + t) % 2
        is_last = t + 1 == here.num_key_tiles

        @pl.when(~is_last)
        def _():
            _start_reads(static, r, r.table, here, t + 1, 1 - half)

        @pl.when(is_last & has_next & ~must_wait)
        def _():
            _start_reads(static, r, r.next_table, after, jnp.int32(0), 1 - half)

        _finish_reads(static, r, here, t, half)
        units = _start_writes(static, r, here, t, half)
        base = here.key_tile(static, t)[0] * static.page_size
        _for_heads(static, r, lambda heads: _attend_heads(static, r, here, base, half, heads))
        _finish_writes(static, r, units)

    jax.lax.fori_loop(0, here.num_key_tiles, visit, None)
    next_half = (first_half + here.num_key_tiles) % 2
    r.half[0] = next_half

    @pl.when(has_next & must_wait)
    def _():
        _start_reads(static, r, r.next_table, after, jnp.int32(0), next_half)


def _reads_what_was_written(static: Static, r: Refs, here: Span, after: Span) -> jax.Array:
    """Whether the next query tile's first key tile has a page that this one's last key tile writes. Its copy must then not
    start before."""
    last = (here.end - 1) // static.page_size  # whoever has this page in the table is the same row: nobody else owns it
    same_row = r.table[0, 0, last] == r.next_table[0, 0, last]
    first_written = jnp.maximum(here.start // static.page_size, here.key_tile(static, here.num_key_tiles - 1)[0])
    return same_row & (after.first_page + static.tile_pages > first_written)


def _start_reads(static: Static, r: Refs, table: Ref, span: Span, t: jax.Array, half: jax.Array) -> None:
    page, num_pages = span.key_tile(static, t)

    def start(i: jax.Array, _: None) -> None:
        _read(r, r.scalars[0] + table[0, 0, page + i], i, half).start()

    jax.lax.fori_loop(0, num_pages, start, None)


def _finish_reads(static: Static, r: Refs, span: Span, t: jax.Array, half: jax.Array) -> None:
    # All pages of a half count on one semaphore, by bytes: any page's description will do to wait for one.
    finish = lambda i, _: _read(r, 0, i, half).wait()  # noqa: E731
    jax.lax.fori_loop(0, span.key_tile(static, t)[1], finish, None)


def _read(r: Refs, page: jax.Array | int, i: jax.Array, half: jax.Array) -> Any:
    """The copy of a page, absolute, to the i-th place of a key tile."""
    return pltpu.make_async_copy(r.pool.at[page], r.kv.at[half, :, :, i], r.read_done.at[half])


def _start_writes(static: Static, r: Refs, span: Span, t: jax.Array, half: jax.Array) -> jax.Array:
    """Merges the new K/V that fall into key tile `t` into its copy in VMEM, and starts copying the write units that have
    any to the pool; returns how many."""
    size, page_size = static.unit, static.page_size
    page, num_pages = span.key_tile(static, t)
    first = jnp.maximum(span.start, page * page_size) // size
    end = pl.cdiv(jnp.minimum(span.end, (page + num_pages) * page_size), size)

    def start(unit: jax.Array, _: None) -> None:
        begin = unit * size  # position of its first token
        index = begin // page_size
        place = _UnitPlace(index - page, pl.ds(pl.multiple_of(begin % page_size, size), size))
        copy = _write(r, r.scalars[0] + r.table[0, 0, index], place, half)
        old = _wide(r.kv[half, :, :, place.i, place.rows])
        new = _wide(r.new[0, :, :, unit - span.start // size])
        position = begin + jax.lax.broadcasted_iota(jnp.int32, old.shape, 2)
        is_new = (position >= span.start) & (position < span.end)
        merged = jnp.where(is_new, jnp.broadcast_to(new, old.shape), old)
        r.kv[half, :, :, place.i, place.rows] = merged.astype(r.kv.dtype)
        copy.start()

    jax.lax.fori_loop(first, end, start, None)
    return jnp.maximum(end - first, 0)


def _finish_writes(static: Static, r: Refs, num_units: jax.Array) -> None:
    any_unit = _UnitPlace(0, pl.ds(0, static.unit))
    jax.lax.fori_loop(0, num_units, lambda i, _: _write(r, 0, any_unit, 0).wait(), None)


class _UnitPlace(NamedTuple):
    i: jax.Array | int  # page within the key tile
    rows: Slice  # tokens within the page


def _write(r: Refs, page: jax.Array | int, place: _UnitPlace, half: jax.Array | int) -> Any:
    """The copy of a write unit from a key tile to its place in the pool."""
    here = r.kv.at[half, :, :, place.i, place.rows]
    return pltpu.make_async_copy(here, r.pool.at[page, :, :, place.rows], r.write_done)


def _wide(x: jax.Array) -> jax.Array:
    """As a 32-bit type, which is exact; vectors of smaller ones cannot be selected from on every chip."""
    return x.astype(jnp.int32 if x.dtype == jnp.int8 else jnp.float32)


def _attend_heads(static: Static, r: Refs, span: Span, base: jax.Array, half: jax.Array, heads: Slice) -> None:
    """The queries of `heads` over the keys of a key tile that begins at position `base`, with an online softmax
    (arXiv:1805.02867)."""
    planes = (0, r.kv.shape[1] - 1)  # of K and of V: one and the same for narrow heads
    keys, values = (_in_a_row(r.kv[half, plane, heads].astype(static.dot_dtype)) for plane in planes)
    exists = base + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < span.end
    values = jnp.where(exists, values, jnp.zeros_like(values))  # 0 * NaN is NaN
    scores = _batched_dot(r.q[0, heads].astype(static.dot_dtype), keys, 2) * (static.scale * static.kv_scale[0])
    if static.soft_cap is not None:
        scores = static.soft_cap * jnp.tanh(scores / static.soft_cap)
    position = base + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    query = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) // static.groups
    last_key = jnp.minimum(span.start + query, span.end - 1)
    seen = position <= last_key
    if static.has_window:
        seen &= position > last_key - r.scalars[1]
    scores = jnp.where(seen, scores, NEG_INF)  # [k, GQ, C]
    old_peak = r.peak[heads]
    peak = jnp.maximum(old_peak, scores.max(axis=-1, keepdims=True))
    weight = jnp.exp(scores - peak)
    keep = jnp.exp(old_peak - peak)
    r.peak[heads] = peak
    r.total[heads] = r.total[heads] * keep + weight.sum(axis=-1, keepdims=True)
    r.acc[heads] = r.acc[heads] * keep + _batched_dot(weight.astype(static.dot_dtype), values, 1)


def _in_a_row(x: jax.Array) -> jax.Array:
    """[k, tile_pages, S, lanes] -> [k, C, lanes]"""
    return x.reshape(x.shape[0], -1, x.shape[3])


def _batched_dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """Contract the last axis of `a [k, GQ, .]` with axis `contract_b` of `b [k, ., .]`, in float32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((2,), (contract_b,)), ((0,), (0,))), precision=exact, preferred_element_type=jnp.float32
    )

"""The device programs: pure functions of (params, pool, row state, batch), which `runner` jits with donation.

`mixed` computes prefill chunks and one token for decode rows in one pass that shares the matmuls (without decode rows
it is the *prefill* program); `decode` makes up to `num_steps` tokens per row in one `lax.while_loop`, stop detection
included.

Everything here is written for one data shard: its rows, its pages. Shards only agree on how long they go on
(`sharding.any_data_shard`).

Axis letters: T tokens, N query tiles, Q tokens per tile, R decode rows, M pages per row (of all groups of layers, one
group's after the other's), P pages, S tokens per page, E embed, H query heads, K KV heads, D head dim, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv import sharding
from jaxkv.device import automata, batch, kv_pool, sampler
from jaxkv.device.automata import Tables
from jaxkv.device.row_state import RowParams, RowState, count_tokens
from jaxkv.device.sampler import Logprobs
from jaxkv.models.groups import LayerGroups
from jaxkv.models.layers import Attend
from jaxkv.ops import Backend
from kernels_pallas.paged_attention import Tiles


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Static facts the programs need."""

    num_pages: int  # per layer
    page_size: int
    query_tile: int
    max_steps: int  # most decode steps of one call
    groups: LayerGroups | None = None  # each has a part of the rows' page tables; None: all layers are one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedOutput:
    token_ids: jax.Array  # int32 [R + N]: decode rows, then the token sampled at the end of each tile
    counts: jax.Array  # int32 [R + N]: 1 where a token was sampled
    logprobs: Logprobs  # [R + N, ...]
    prompt_scores: Logprobs  # [N * Q, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    token_ids: jax.Array  # int32 [max_steps, R]
    counts: jax.Array  # int32 [R]: tokens made
    logprobs: Logprobs  # [max_steps, R, ...]


def decode(
    model: Any,
    pool: jax.Array,
    state: RowState,
    tables: Tables,
    rows: jax.Array,
    num_steps: jax.Array,
    shape: StepShape,
    ops: Backend,
) -> tuple[jax.Array, RowState, DecodeOutput]:
    """Up to `num_steps` (int32 [], <= max_steps) tokens for each of `rows` int32 [R].

    Ends early when all rows are done, on all data shards.
    """
    params = _take(state.params, rows)
    page_table = state.page_table[rows]
    num_rows = rows.shape[0]
    empty = jax.tree.map(lambda a: jnp.zeros((shape.max_steps, *a.shape), a.dtype), sampler.no_logprobs(num_rows))
    out = DecodeOutput(jnp.zeros((shape.max_steps, num_rows), jnp.int32), jnp.zeros(num_rows, jnp.int32), empty)

    def is_running(step: jax.Array, state: RowState) -> jax.Array:
        return sharding.any_data_shard((step < num_steps) & ~state.done[rows].all())

    def one_token(carry: tuple[jax.Array, jax.Array, jax.Array, RowState, DecodeOutput]):
        step, _, pool, state, out = carry
        live = ~state.done[rows]
        position = state.position[rows]
        attend = _attend((_decode_rows(page_table, position, live),), shape, ops)
        hidden, pool = model.hidden(state.last_token[rows], position, pool, attend)
        logits = _logits(model, hidden)
        state, token_ids, logprobs = _sample_and_advance(logits, params, state, tables, rows, position + 1, live)
        out = DecodeOutput(
            out.token_ids.at[step].set(token_ids),
            out.counts + live.astype(jnp.int32),
            jax.tree.map(lambda all_, new: all_.at[step].set(new), out.logprobs, logprobs),
        )
        return step + 1, is_running(step + 1, state), pool, state, out

    start = (jnp.int32(0), is_running(jnp.int32(0), state), pool, state, out)
    _, _, pool, state, out = jax.lax.while_loop(lambda carry: carry[1], one_token, start)
    return pool, state, out


def mixed(
    model: Any,
    pool: jax.Array,
    state: RowState,
    tables: Tables,
    token_ids: jax.Array,  # int32 [N * Q]
    next_token_ids: jax.Array,  # int32 [N * Q]
    tiles: jax.Array,  # int32 [N, 6], see batch
    rows: jax.Array,  # int32 [R], may be empty
    shape: StepShape,
    ops: Backend,
) -> tuple[jax.Array, RowState, MixedOutput]:
    """K/V of all tiles and one token for each decode row and each tile that ends a prompt."""
    num_rows, num_tiles = rows.shape[0], tiles.shape[0]
    live = ~state.done[rows]
    position = state.position[rows]
    start, length = tiles[:, batch.START], tiles[:, batch.LENGTH]
    tile_position = start[:, None] + jnp.arange(shape.query_tile, dtype=jnp.int32)[None, :]  # [N, Q]
    decode_part = _decode_rows(state.page_table[rows], position, live)
    tile_tables, chunk_start = state.page_table[tiles[:, batch.ROW]], tiles[:, batch.CHUNK_START]
    tile_part = Tiles(tile_tables, start, length, chunk_start, width=shape.query_tile)
    attend = _attend((decode_part, tile_part) if num_rows else (tile_part,), shape, ops)
    hidden, pool = model.hidden(
        jnp.concatenate([state.last_token[rows], token_ids]),
        jnp.concatenate([position, tile_position.reshape(-1)]),
        pool,
        attend,
    )
    tile_hidden = hidden[num_rows:].reshape(num_tiles, shape.query_tile, -1)
    last = jnp.maximum(length - 1, 0)
    ends = jnp.take_along_axis(tile_hidden, last[:, None, None], axis=1)[:, 0]
    samples = tiles[:, batch.SAMPLES] == 1
    all_rows = jnp.concatenate([rows, tiles[:, batch.ROW]])
    all_live = jnp.concatenate([live, samples])
    new_position = jnp.concatenate([position + 1, start + length])
    logits = _logits(model, jnp.concatenate([hidden[:num_rows], ends]))
    state, sampled, logprobs = _sample_and_advance(
        logits, _take(state.params, all_rows), state, tables, all_rows, new_position, all_live
    )
    scores = _score_prompts(model, tile_hidden, next_token_ids, tiles[:, batch.SCORES] == 1)
    return pool, state, MixedOutput(sampled, all_live.astype(jnp.int32), logprobs, scores)


def _decode_rows(page_table: jax.Array, position: jax.Array, live: jax.Array) -> Tiles:
    return Tiles(page_table, position, live.astype(jnp.int32), position, width=1)


def _take(params: RowParams, rows: jax.Array) -> RowParams:
    return jax.tree.map(lambda a: a[rows], params)


def _logits(model: Any, hidden: jax.Array) -> jax.Array:
    """float32 [N, V], on every tensor shard: one collective here, instead of many in the branches of the sampler."""
    return sharding.whole(model.logits(hidden))


def _attend(parts: tuple[Tiles, ...], shape: StepShape, ops: Backend) -> Attend:
    """Attention for tokens that are the parts' tokens, one part after the other; the kernel sees local heads only."""
    heads, pages = sharding.spec(None, "kv_heads"), sharding.spec(None, *kv_pool.AXES[1:])

    def attend(
        layer: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pool: jax.Array,
        *,
        scale: float,
        window: jax.Array | int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, jax.Array]:
        def kernel(*args: Any) -> tuple[jax.Array, jax.Array]:
            return ops.paged_attention(*args[:-1], scale=scale, window=args[-1], soft_cap=soft_cap)

        in_specs = (heads, heads, heads, pages, P(), P(), P())
        run = sharding.on_tensor_shards(kernel, in_specs, out_specs=(heads, pages))
        seen, place = _of_layer(parts, layer, shape.groups)
        return run(q, k, v, pool, seen, place * shape.num_pages, window)

    return attend


def _of_layer(
    parts: tuple[Tiles, ...], layer: jax.Array, groups: LayerGroups | None
) -> tuple[tuple[Tiles, ...], jax.Array]:
    """The parts with the page tables of the layer's group, and the layer's place in its pages."""
    if groups is None or groups.num == 1:
        return parts, layer
    group, place = (jnp.asarray(of, jnp.int32)[layer] for of in (groups.group_of, groups.place_of))

    def seen(part: Tiles) -> Tiles:
        num_pages = part.page_table.shape[1] // groups.num
        table = jax.lax.dynamic_slice_in_dim(part.page_table, group * num_pages, num_pages, axis=1)
        return dataclasses.replace(part, page_table=table)

    return tuple(map(seen, parts)), place


def _sample_and_advance(
    logits: jax.Array,  # float32 [N, V]
    params: RowParams,  # of the N rows
    state: RowState,
    tables: Tables,
    rows: jax.Array,  # int32 [N]
    position: jax.Array,  # int32 [N]: of the token to sample
    live: jax.Array,  # bool [N]
) -> tuple[RowState, jax.Array, Logprobs]:
    """Sample for all, remember for the live ones: a row that is not live stays as it was."""
    recent, grammar = state.recent[rows], (state.grammar_state[rows], state.grammar_count[rows])

    def choose() -> jax.Array:
        allowed = automata.constrain(logits, params, *grammar, position, tables, live)
        return sampler.sample(allowed, params, position, state.counts, rows, recent, live)

    plain = sampler.is_plain(params, position) & (params.grammar_states == 0)
    token_ids = jax.lax.cond((live & ~plain).any(), choose, lambda: sampler.argmax(logits))
    logprobs = sampler.logprobs_of(logits, token_ids, live & params.wants_logprobs)
    # A grammar lets a stop id through too early only where nothing else is left (behaviour 29): then it counts.
    may_stop = (position >= params.min_total_len) | (params.grammar_states != 0)
    stopped = (token_ids[:, None] == params.stop_ids).any(axis=1) & may_stop
    done = stopped | (position + 1 >= params.max_total_len)
    grammar_state, grammar_count = automata.advance(token_ids, params, *grammar, tables)
    null_row = state.done.shape[0] - 1
    target = jnp.where(live, rows, null_row)
    state = dataclasses.replace(
        state,
        last_token=state.last_token.at[target].set(token_ids),
        position=state.position.at[target].set(position),
        done=state.done.at[target].set(done | ~live),
        recent=state.recent.at[target].set(sampler.push_recent(recent, token_ids)),
        counts=count_tokens(state.counts, target, token_ids),
        grammar_state=state.grammar_state.at[target].set(grammar_state),
        grammar_count=state.grammar_count.at[target].set(grammar_count),
    )
    return state, token_ids, logprobs


def _score_prompts(model: Any, hidden: jax.Array, next_token_ids: jax.Array, wanted: jax.Array) -> Logprobs:
    """Raw log-probabilities [N * Q] of `next_token_ids` for tiles that want them; one tile's logits at a time."""
    num_tiles, num_queries, _ = hidden.shape
    wanted = sharding.any_data_shard(wanted)

    def score(tile: tuple[jax.Array, jax.Array, jax.Array]) -> Logprobs:
        tile_hidden, ids, want = tile
        return jax.lax.cond(
            want,
            lambda: sampler.logprobs_of(_logits(model, tile_hidden), ids, jnp.ones(num_queries, bool)),
            lambda: sampler.no_logprobs(num_queries),
        )

    def score_all() -> Logprobs:
        scores = jax.lax.map(score, (hidden, next_token_ids.reshape(num_tiles, num_queries), wanted))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), scores)

    return jax.lax.cond(wanted.any(), score_all, lambda: sampler.no_logprobs(num_tiles * num_queries))

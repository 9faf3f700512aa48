"""The compiled programs: nothing compiles after warm-up, and the pool is updated in place."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.device.batch import TILE_COLUMNS
from jaxkv.device.runner import Runner
from jaxkv.plan import PageCopy, PageWrite, StepPlan
from tests import tiny
from tests.device import stage
from tests.device.sampling import row
from tests.device.stage import MAX_ROWS, PAGE, TILE, Stage, make_runner


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Names the programs that are traced, lowered or compiled meanwhile, also those a disk cache could serve."""
    found: list[str] = []

    def listen(event: str, _: float, **details: object) -> None:
        if "/jax/core/compile/" in event:
            found.append(f"{event} {details.get('fun_name', '')}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def run_everything(script: Stage) -> None:
    """Setups, page writes, copies, counts, chunks of one to ten tiles beside 0 to all rows, device loops."""
    script.place(0, row(prompt=(1,) * 5, temperature=0, max_tokens=60))
    script.run(script.chunk(0))
    for num in range(1, MAX_ROWS):
        for steps in (1, 3):
            script.run(decode=tuple(range(num)), steps=steps)
        script.place(num, row(prompt=(num,) * 80, repetition_penalty=1.5, logprobs=3))
        script.copy(num, 1, 2)
        script.run(script.chunk(num, 0, TILE), decode=tuple(range(num)))
        script.run(script.chunk(num, TILE), decode=tuple(range(num - 1)))
    for at in range(MAX_ROWS):
        script.place(at, row(prompt=(7,) * PAGE, seed=1, top_p=0.5, prompt_logprobs=1, max_tokens=60))
    script.run(*(script.chunk(at, prompt_logprobs=1) for at in range(MAX_ROWS)))
    script.run(decode=tuple(range(MAX_ROWS)), steps=2)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 2)])
def test_nothing_compiles_after_warm_up(data: int, tensor: int) -> None:
    """Neither traced nor compiled, for any plan (behaviour 40); on four devices shardings do not drift either."""
    table = stage.BUCKETS
    if data == tensor == 1:  # on four devices one bucket of each program must do
        table = dataclasses.replace(table, decode_rows=(2, 4), mixed_rows=(0, 4))
    runner = make_runner(tensor=tensor, data=data, buckets=table)
    with compilations() as in_warm_up:
        seen: list[int] = []
        runner.warm_up(lambda: seen.append(1))
    assert len(seen) == runner.num_programs == sum(runner.num_traces.values())
    assert any("backend_compile" in event for event in in_warm_up), "the listener hears compilations"
    before = dict(runner.num_traces)
    script = Stage(runner)  # resetting compiles
    with compilations() as found:
        run_everything(script)
    assert found == [] and dict(runner.num_traces) == before


# --- in place --------------------------------------------------------------------------------------------------------


def arguments(runner: Runner, name: str) -> tuple:
    rows = np.zeros(4, np.int32)
    if name == "decode":
        return rows, np.int32(1)
    tokens, tiles = np.zeros(12 * TILE, np.int32), np.zeros((12, TILE_COLUMNS), np.int32)
    return tokens, tokens, tiles, rows


@pytest.mark.parametrize(
    ("per_layer", "dtype"),
    [(True, jnp.float32), (False, jnp.float32), (True, jnp.bfloat16)],
    ids=["per_layer", "stacked", "bf16"],
)
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_the_pool_is_never_copied(name: str, per_layer: bool, dtype: jnp.dtype) -> None:
    """Donation took (alias size), no temporary is as large as a layer's share, and no instruction copies the pool."""
    runner = make_runner(tiny.model(stage.MODEL, per_layer=per_layer, dtype=dtype))
    pool, state = runner._pool, runner._state
    assert pool is not None and state is not None
    args = runner._params, pool, state, runner._tables, *arguments(runner, name)
    compiled = getattr(runner._programs, name).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < pool.nbytes / stage.MODEL.num_layers / 2
    shape = ",".join(map(str, pool.shape))
    made = re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", compiled.as_text())
    assert "scatter" in made or "dynamic-update-slice" in made, "the pool's updates are found in the text"
    assert not {"copy", "convert", "bitcast-convert"} & set(made)


def test_steps_keep_pool_and_state_where_they_are(runner: Runner) -> None:
    """The same memory before and after, for every kind of step and delta."""
    script = Stage(runner)
    assert runner._pool is not None and runner._state is not None
    script.place(0, row(prompt=(1, 2, 3), repetition_penalty=1.3))
    pool, counts = runner._pool, runner._state.counts
    places = pool.unsafe_buffer_pointer(), counts.unsafe_buffer_pointer()
    script.copy(0, 5, 6)
    script.run(script.chunk(0))
    script.run(decode=(0,), steps=4)
    assert (runner._pool.unsafe_buffer_pointer(), runner._state.counts.unsafe_buffer_pointer()) == places
    assert pool.is_deleted() and counts.is_deleted()


def test_more_deltas_than_a_bucket_holds() -> None:
    """They go in rounds, in order, and one that fills its bucket exactly in one."""
    table = dataclasses.replace(stage.BUCKETS, setups=(1, 2), page_writes=(3,), page_copies=(1, 2))
    runner = make_runner(buckets=table, num_pages=10)
    setups = tuple(row(prompt=(at,) * 3, temperature=at, presence_penalty=1.0).setup(at) for at in range(3))
    writes = tuple(PageWrite(n % 3, n // 3, n + 1) for n in range(8))
    pool = np.random.default_rng(0).standard_normal(runner.pool_spec.shape).astype(np.float32)
    assert runner._pool is not None
    runner._pool = jax.device_put(pool.copy(), runner._pool.sharding)
    copies = tuple(PageCopy(0, *pair) for pair in ((1, 2), (2, 3), (5, 6), (7, 8), (2, 9)))
    runner._apply_deltas(StepPlan(step_id=0, setups=setups, page_writes=writes, page_copies=copies))
    state = runner._state
    assert state is not None
    assert state.params.temperature[:3].tolist() == [0, 1, 2] and state.done.tolist() == [False] * 3 + [True] * 2
    assert np.asarray(state.page_table)[:4, :4].tolist() == [[1, 4, 7, 0], [2, 5, 8, 0], [3, 6, 0, 0], [0] * 4]
    assert [np.flatnonzero(counts).tolist() for counts in np.asarray(state.counts)] == [[0], [1], [2], [], []]
    expected = pool.reshape(2, 10, *pool.shape[1:])
    for targets, sources in (([2, 3], [1, 2]), ([6, 8], [5, 7]), ([9], [2])):  # both are read before either is written
        expected[:, targets] = expected[:, sources]
    np.testing.assert_array_equal(np.asarray(runner._pool), expected.reshape(pool.shape))

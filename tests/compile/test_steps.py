"""The step programs through the TPU and GPU compilers, without TPU or GPU: in place, no copies, no surprise collectives."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkv.capacity import topology
from jaxkv.capacity.checks import complaints
from jaxkv.capacity.compiled import AbstractEngine, StepFacts
from jaxkv.capacity.known import KNOWN
from jaxkv.capacity.proof import CASES, FAMILY_CASES, ROWS, Case, engine_of, layout_of, prove
from jaxkv.device import automata, programs, sampler
from jaxkv.device.settings import EngineConfig
from jaxkv.errors import ConfigError
from jaxkv.grammar_layout import STATE_COLUMNS
from jaxkv.models import decoder

pytestmark = pytest.mark.compile

SMALL = Case("v6e:2x2", "llama-3.2-1b", tensor=4)
MOST_MOVED = {"tpu": 1.05, "gpu": 1.12, "xla": 1.2}  # bytes of a decode step over weights, live K/V and logits


@pytest.fixture(autouse=True)
def _no_compilation_cache() -> Iterator[None]:
    """What a compiler without its device has made cannot be read back from the cache."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@pytest.fixture(scope="module", autouse=True)
def _compile_only() -> None:
    topology.prepare_environment()


def need(case: Case) -> None:
    """Skips where the compiler is not installed."""
    try:
        topology.check_compiler(case.parsed.chip)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in FAMILY_CASES)], ids=str
)
def test_step_programs(case: Case) -> None:
    need(case)
    proof = prove(case)
    kernels = {"v5e": "tpu", "v6e": "tpu", "tpu7x": "tpu", "h100": "gpu", "h200": "gpu"}
    for step, found in zip(proof.steps, proof.complaints, strict=True):
        assert step.attention == kernels.get(case.parsed.chip.name, "xla")
        assert not found, step
    if not layout_of(case).copied_bytes(case.parsed.chip):
        assert proof.ratio <= MOST_MOVED[proof.steps[0].attention]


# --- every family, with narrow layers and greedy decoding: what families differ in is quick to compile -----------------

FAMILIES = tuple(dict.fromkeys(case.model for case in FAMILY_CASES))


@pytest.mark.parametrize(
    ("model", "chip"),
    [
        pytest.param(model, chip, marks=() if (i + j) % 2 else pytest.mark.exhaustive)
        for i, model in enumerate(FAMILIES)
        for j, chip in enumerate(("v6e:1x1", "h200x1"))
    ],
)
def test_layers_of_families(model: str, chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode rows in one step."""
    monkeypatch.setitem(KNOWN, "narrow", _narrow(KNOWN[model]))
    monkeypatch.setattr(programs, "_sample_and_advance", _take_likeliest)
    monkeypatch.setattr(programs, "_score_prompts", lambda _, __, ids, ___: sampler.no_logprobs(ids.shape[0]))
    case = Case(chip, "narrow", programs=("mixed",))
    need(case)
    assert prove(case).complaints == ((),)


def _narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model with its own layers and heads, but fewer numbers in each."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    narrow = {"head_dim": head_dim, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8192}
    return {**config, **narrow, **({"moe_intermediate_size": 512} if "moe_intermediate_size" in config else {})}


def _take_likeliest(
    logits: jax.Array, params: Any, state: Any, tables: Any, rows: jax.Array, position: jax.Array, live: jax.Array
) -> tuple[Any, jax.Array, Any]:
    """Stands in for sampler and grammars, which are the same for all families and most of a step's compile time."""
    ids = logits.argmax(axis=-1).astype(jnp.int32)
    state = dataclasses.replace(
        state, last_token=state.last_token.at[rows].set(ids), position=state.position.at[rows].set(position)
    )
    return state, ids, sampler.no_logprobs(rows.shape[0])


@pytest.mark.parametrize(
    ("topology", "tensor", "most"),
    [
        ("v6e:2x4", 8, 1.15),
        pytest.param("v6e:1x1", 1, 1.15, marks=pytest.mark.exhaustive),
        # Copied out of the stack, see `ops.GPU_QUANTISED_OPTIONS`: if this fails for less, all the better.
        pytest.param("h200x1", 1, 2.6, marks=pytest.mark.exhaustive),
    ],
)
def test_quantised_weights_stay_so_up_to_the_product(topology: str, tensor: int, most: float) -> None:
    """No layer of them is written in bfloat16: the temporaries have no room for it, and the bytes moved are int8's."""
    case = Case(topology, "llama-3.1-8b", tensor=tensor, programs=("decode",), quant="int8")
    need(case)
    proof = prove(case)
    assert proof.complaints == ((),)
    assert (
        proof.weight_bytes
        == layout_of(case).weight_bytes
        < 0.54 * layout_of(dataclasses.replace(case, quant=None)).weight_bytes
    )
    assert most - 0.2 < proof.ratio <= most


# --- what the checks are worth: programs that copy the pool -----------------------------------------------------------


@pytest.mark.parametrize("topology_name", ["v6e:2x2", "h200x4"])
def test_without_donation_the_checks_fail(topology_name: str) -> None:
    case = Case(topology_name, SMALL.model, tensor=4)
    need(case)
    engine = _third_of_the_pool(engine_of(case), case)  # two pools have to fit
    plain = jax.jit(engine.programs.decode.__wrapped__)
    facts = engine.facts("decode", plain, engine.arguments("decode", rows=ROWS), ROWS)
    assert any("not updated in place" in each for each in _complaints(facts, case))


@pytest.mark.parametrize("topology_name", ["v6e:2x2", "h200x4"])
def test_with_the_pool_as_xs_and_ys_the_checks_fail(topology_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alias size is as it should be; the copies are seen all the same."""
    case = Case(topology_name, SMALL.model, tensor=4)
    need(case)
    monkeypatch.setattr(decoder, "run_layers", _run_layers_over_the_pool)
    engine = _third_of_the_pool(engine_of(case), case)
    facts = engine.decode(ROWS)
    found = _complaints(facts, case)
    assert any("as large as a layer of the pool" in each for each in found), found
    assert facts.alias_bytes >= facts.pool_bytes


def test_without_its_option_a_tpu7x_copies_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("tpu7x:1x1x1", "llama-3.2-1b", tensor=2)
    need(case)
    engine = _third_of_the_pool(engine_of(case), case)  # room for the copies
    monkeypatch.setattr(engine.programs, "decode", jax.jit(engine.programs.decode.__wrapped__, donate_argnums=(1, 2)))
    found = _complaints(engine.decode(ROWS), case)
    assert any("of the arguments are copied" in each for each in found), found


def test_states_as_rows_of_a_table_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which lie column by column, because rows of 13 would be padded to 128; see `automata`."""
    case = Case("v6e:1x1", "llama-3.2-1b")
    need(case)
    engine = engine_of(case)
    flat = engine.tables.states
    rows = jax.ShapeDtypeStruct((flat.size // STATE_COLUMNS, STATE_COLUMNS), flat.dtype, sharding=flat.sharding)
    engine.tables = dataclasses.replace(engine.tables, states=rows)
    monkeypatch.setattr(automata, "_column", lambda tables, states, column: tables.states[states][:, column])
    found = _complaints(engine.decode(ROWS), case)
    assert any("of the arguments are copied" in each for each in found), found


def _complaints(facts: StepFacts, case: Case) -> list[str]:
    return complaints(facts, tensor=case.tensor, usable_bytes=topology.usable_bytes(case.parsed.chip))


def _third_of_the_pool(engine: AbstractEngine, case: Case) -> AbstractEngine:
    """The same with a third of the pages."""
    pages = (engine.resolved.pool.num_pages - 1) // 3
    config = EngineConfig(num_pages=pages, max_rows=ROWS, max_len=8192)
    return AbstractEngine(KNOWN[case.model], engine.mesh, config)


def _run_layers_over_the_pool(layers: Any, body: Any, carry: Any, num_layers: int) -> Any:
    """`layers.run_layers` with each layer's pages as scanned input and output."""
    x, pool = carry
    graph, stacked = nnx.split(layers)
    first = jnp.int32(0)  # of a layer's own pages

    def one(x: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
        weights, pages = xs
        return body(nnx.merge(graph, weights), first, (x, pages))

    x, pools = jax.lax.scan(one, x, (stacked, pool.reshape(num_layers, -1, *pool.shape[1:])))
    return x, pools.reshape(pool.shape)

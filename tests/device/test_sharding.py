"""The same tokens on every mesh, in place, with two all-reduces a layer and no weight or page sent around."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkv.api import LLM
from jaxkv.device.batch import Buckets
from jaxkv.device.runner import Runner
from jaxkv.errors import ConfigError
from jaxkv.models.config import LayerKind
from jaxkv.models.groups import LayerGroups, group_layers
from jaxkv.models.kv_heads import copy_kv_heads
from jaxkv.models.rope import Rope
from jaxkv.request import RequestOutput, SamplingParams
from jaxkv.schedule.scheduler import SchedulerStats
from tests import tiny
from tests.checkpoint.tools import hf_config, random_tensors, write_hf
from tests.device.engine_stage import Ask, Client, ask
from tests.device.stage import MAX_LEN, TILE, V, make_runner

MAX_ROWS = 8
NUM_PAGES = 8  # a shard's: two long rows do not fit
TILES = 4
VOCAB = 104  # divides by eight
MODELS = {
    "grouped": tiny.config(vocab_size=VOCAB, num_heads=8, num_kv_heads=2, tied=True),
    "multi-query": tiny.config(vocab_size=VOCAB, num_heads=8, num_kv_heads=1, tied=False),
    # Layers in groups with pages of their own, given back while a row runs: as in Gemma 3, and as in Mistral 7B v0.1.
    "local-global": tiny.config(
        vocab_size=VOCAB, num_layers=3, num_kv_heads=1, qk_norm="head", post_norm=True,
        kinds=(*[LayerKind(rope=Rope(head_dim=8), window=9)] * 2, LayerKind(rope=Rope(head_dim=8, base=1e6))),
    ),
    "windows": tiny.config(vocab_size=VOCAB, kinds=(LayerKind(rope=Rope(head_dim=8), window=9),)),
}  # fmt: skip
RNG = np.random.default_rng(0)
TOKENS = tuple(RNG.integers(3, V, 200).tolist())


def groups_of(name: str) -> LayerGroups:
    return group_layers(MODELS[name].windows, MAX_LEN)


def num_pages(name: str) -> int:
    """Of a shard."""
    return (NUM_PAGES - 1) * groups_of(name).num + 1


def runner_on(data: int, tensor: int, name: str, per_layer: bool) -> Runner:
    rows = MAX_ROWS // data
    buckets = Buckets(
        decode_rows=(rows,), mixed_rows=(rows,), mixed_tiles=(TILES,), setups=(2,), page_writes=(16,),
        page_copies=(2,), count_tokens=(MAX_LEN,),
    )  # fmt: skip
    return make_runner(
        tiny.model(MODELS[name], per_layer=per_layer), data=data, tensor=tensor, buckets=buckets, max_rows=MAX_ROWS,
        num_pages=num_pages(name), groups=groups_of(name),
    )  # fmt: skip


def asks() -> Iterator[Ask]:
    """Chunks that cross steps, shared beginnings, forks, every way to choose, rows of all lengths."""
    shared = TOKENS[:9]
    yield ask(TOKENS[50:91], max_tokens=10)
    yield ask(shared + TOKENS[30:33], max_tokens=30, ignore_eos=True)
    yield ask(shared, max_tokens=20, temperature=0.8, top_p=0.9, seed=5, n=2, ignore_eos=True)
    yield ask((*shared, 7), max_tokens=16, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2)
    yield ask(TOKENS[111:114], max_tokens=40, temperature=1.2, top_k=20, seed=2**63 + 1, ignore_eos=True)
    yield ask(TOKENS[120:135], max_tokens=12, temperature=1.0, min_p=0.02, seed=9, logprobs=2, ignore_eos=True)
    yield ask((9,), max_tokens=25, temperature=0.5, seed=1, allowed_token_ids=tuple(range(3, 60)), min_tokens=20)
    yield ask(shared + TOKENS[60:70], max_tokens=3, prompt_logprobs=1, logit_bias={5: 4.0})


def serve(runner: Runner, name: str) -> tuple[list[RequestOutput], SchedulerStats]:
    """The requests, and some of them again, which find their prefixes; pool and row state stay where they are."""
    client = Client(runner, num_pages=num_pages(name), token_budget=TILES * TILE)
    assert runner._pool is not None and runner._state is not None
    places = pointers(runner._pool), pointers(runner._state.counts)
    outputs = client.generate(*asks()) + client.generate(*list(asks())[:3])
    assert (pointers(runner._pool), pointers(runner._state.counts)) == places
    client.check_idle()
    return outputs, client.engine.stats()


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@functools.cache
def alone(name: str) -> list[RequestOutput]:
    """What one device makes of it."""
    return serve(runner_on(1, 1, name, per_layer=True), name)[0]


@pytest.mark.parametrize(
    ("data", "tensor", "name", "per_layer"),
    [
        (1, 2, "grouped", False), (2, 2, "grouped", True), (1, 4, "multi-query", False), (2, 4, "grouped", False),
        (8, 1, "multi-query", False), (1, 8, "grouped", False), (2, 2, "local-global", False),
        # Rows over two shards, and over shards alone, are also above.
        pytest.param(2, 1, "multi-query", False, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, "grouped", False, marks=pytest.mark.exhaustive),
        *(
            pytest.param(*mesh, name, True, marks=pytest.mark.exhaustive)
            for name in ("local-global", "windows") for mesh in ((1, 2), (2, 1), (2, 4))
        ),
    ],
)  # fmt: skip
def test_tokens_do_not_depend_on_the_mesh(data: int, tensor: int, name: str, per_layer: bool) -> None:
    """Token for token in float32."""
    runner = runner_on(data, tensor, name, per_layer)
    assert runner._pool is not None
    assert runner._pool.addressable_shards[0].data.shape[2] == max(MODELS[name].num_kv_heads // tensor, 1)
    outputs, stats = serve(runner, name)
    for got, expected in zip(outputs, alone(name), strict=True):
        assert [one.token_ids for one in got.outputs] == [one.token_ids for one in expected.outputs]
        if expected.prompt_logprobs:
            np.testing.assert_allclose(scores(got), scores(expected), atol=1e-4)
    assert stats.num_hit_tokens > 0
    assert stats.num_preemptions > 0 or data > 2
    assert (stats.num_left_windows > 0) == any(MODELS[name].windows)


def scores(output: RequestOutput) -> list[float]:
    return [each.logprob for each in output.prompt_logprobs or () if each is not None]


# --- what the compiler made of it ------------------------------------------------------------------------------------


def test_two_all_reduces_a_layer_and_nothing_large() -> None:
    """In the decode program on (2, 4), KV heads copied: counted in the loop over layers."""
    runner = runner_on(2, 4, "grouped", per_layer=False)
    assert runner._pool is not None
    args = np.zeros(MAX_ROWS, np.int32), np.int32(1)
    compiled = runner._programs.decode.lower(
        runner._params, runner._pool, runner._state, runner._tables, *args
    ).compile()
    found = collectives(compiled.as_text())
    embed, rows = MODELS["grouped"].embed, MAX_ROWS // 2
    in_layers = [names for names in found.values() if names.count(f"all-reduce [{rows},{embed}]") == 2]
    assert in_layers == [[f"all-reduce [{rows},{embed}]"] * 2], found
    others = sorted(name for names in found.values() if names not in in_layers for name in names)
    # Around it: the embedding, the logits for the sampler, and whether any shard goes on, before the loop and in it.
    assert others == [f"all-gather [{rows},{VOCAB}]", f"all-reduce [{rows},{embed}]", "all-reduce []", "all-reduce []"]
    memory = compiled.memory_analysis()
    state = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(runner._state))
    assert memory.alias_size_in_bytes == runner._pool.nbytes // 8 + state


def test_one_device_has_no_collectives() -> None:
    runner = runner_on(1, 1, "grouped", per_layer=True)
    args = np.zeros(MAX_ROWS, np.int32), np.int32(1)
    text = (
        runner._programs.decode.lower(runner._params, runner._pool, runner._state, runner._tables, *args)
        .compile()
        .as_text()
    )
    assert not collectives(text)


def collectives(hlo: str) -> dict[str, list[str]]:
    """Computation -> its collectives, each with the shape of its result."""
    found: dict[str, list[str]] = {}
    computation = ""
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = head[1]
        names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
        if op := re.search(rf"= \w+(\[[\d,]*\])\S* ({names})(?:-start)?\(", line):
            found.setdefault(computation, []).append(f"{op[2]} {op[1]}")
    return found


# --- from the outside ------------------------------------------------------------------------------------------------


def test_load_on_a_mesh(tmp_path: Path) -> None:
    """The public door: the same answers on six devices, and the numbers over all of them."""
    config = hf_config(num_attention_heads=6, num_key_value_heads=1, head_dim=6, intermediate_size=48)
    folder = write_hf(tmp_path, config, random_tensors(config))
    settings = dict(max_len=48, max_rows=2, page_size=8, num_pages=24, token_budget=64, decode_steps=4, dtype="float32")
    prompts = [[5, 6, 7] * n for n in (1, 9)]
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=4, ignore_eos=True)
    outputs = []
    for mesh in ({}, {"tensor": 3, "data": 2}):
        llm = LLM.load(folder, **settings, **mesh)
        outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
        stats = llm.stats()
        assert llm.num_pages == stats.pages_free + stats.pages_cached == 24
    assert outputs[0] == outputs[1] and llm.mesh == {"data": 2, "tensor": 3}
    with pytest.raises(ConfigError, match="data=4 x tensor=3 needs 12 devices"):
        LLM.load(folder, tensor=3, data=4)
    with pytest.raises(ConfigError, match=r"tensor=4 neither divides num_kv_heads=1 .*choose one of 1, 2, 3, 6"):
        LLM.load(folder, tensor=4)


# --- KV heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "copies"),
    [(8, 8, 8, 1), (8, 2, 1, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 2, 8, 4), (8, 1, 8, 8), (12, 6, 3, 1), (12, 3, 6, 2)],
)
def test_kv_heads_are_copied_for_shards_that_would_have_none(heads, kv_heads, tensor, copies) -> None:
    cfg = tiny.config(num_heads=heads, num_kv_heads=kv_heads)
    copied = copy_kv_heads(cfg, tensor)
    assert (copied.kv_copies, copied.num_kv_heads, copied.as_stored) == (copies, kv_heads * copies, cfg)


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(8, 2, 3), (8, 2, 16), (12, 3, 2), (12, 4, 8)])
def test_heads_that_no_copies_make_even(heads, kv_heads, tensor) -> None:
    cfg = tiny.config(num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(
        ConfigError, match=rf"tensor={tensor} .*num_kv_heads={kv_heads} .*num_heads={heads}; choose one"
    ):
        copy_kv_heads(cfg, tensor)

"""The whole engine on the TPU kernel, interpreted: the same tokens as on the reference, on one device and on a mesh."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxkv import ops
from jaxkv.device.runner import Runner
from jaxkv.request import RequestOutput
from kernels_pallas.paged_attention import tpu
from tests import tiny
from tests.device.engine_stage import Client, ask
from tests.device.stage import BUCKETS, V, make_runner

TPU = dataclasses.replace(
    ops.CPU,
    name="tpu, interpreted",
    paged_attention=functools.partial(tpu.paged_attention, interpret=True),
    storage_dtype=tpu.storage_dtype,
    storage_shape=tpu.storage_shape,
)
TOKENS = tuple(np.random.default_rng(3).integers(3, V, 200).tolist())
SIZES = {"num_pages": 40}  # of the runner and the scheduler


def serve(runner: Runner) -> list[RequestOutput]:
    """Chunks over several steps and tiles, decode rows beside them, a reused prefix, preemption in a small pool."""
    client = Client(runner, num_pages=12, token_budget=40)
    prompts = (TOKENS[:41], TOKENS[:17], TOKENS[100:103], TOKENS[60:92], (9,))
    outputs = client.generate(*[ask(p, max_tokens=12, temperature=0.7 * (i % 2)) for i, p in enumerate(prompts)])
    outputs += client.generate(ask((*TOKENS[:41], 5), max_tokens=6))
    assert outputs[-1].cached_tokens > 0 and client.engine.stats().num_preemptions > 0
    client.check_idle()
    return outputs


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return serve(make_runner(tiny.model(tiny.config(vocab_size=V)), buckets=BUCKETS, **SIZES))


@pytest.mark.parametrize("tensor", [1, 2])
def test_same_tokens_as_the_reference(expected: list[RequestOutput], tensor: int) -> None:
    runner = make_runner(tiny.model(tiny.config(vocab_size=V)), buckets=BUCKETS, backend=TPU, tensor=tensor, **SIZES)
    assert runner._pool is not None and runner._pool.shape[-1] == tpu.LANES
    for got, want in zip(serve(runner), expected, strict=True):
        assert [one.token_ids for one in got.outputs] == [one.token_ids for one in want.outputs]

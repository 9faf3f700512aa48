"""The real engine over host memory and disk: warm output is the cold one, token for token, wherever its pages come from."""

import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv import CacheControl
from jaxkv.api import LLM
from jaxkv.errors import CapacityError, ConfigError, RequestError
from jaxkv.request import RequestOutput, SamplingParams
from tests.checkpoint.tools import hf_config, random_tensors, write_hf

SETTINGS = dict(max_len=96, max_rows=2, page_size=8, num_pages=14, token_budget=64, decode_steps=4, dtype="float32")
FILE = 1056 + 3 * 2 * 2 * 8 * 8 * 4  # bytes of a page's file
PROMPTS = [[int(t) for t in np.random.default_rng(seed).integers(3, 96, 44)] for seed in range(5)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=5, ignore_eos=True, logprobs=1)
KEEP = CacheControl(ttl="1h")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    config = hf_config()
    return write_hf(tmp_path_factory.mktemp("model"), config, random_tensors(config))


@pytest.fixture(scope="module")
def cold(model) -> list[RequestOutput]:
    llm = LLM.load(model, **SETTINGS, prefix_cache=False)
    return [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]


def check_same(warm: RequestOutput, cold: RequestOutput) -> None:
    (one,), (other,) = warm.outputs, cold.outputs
    assert one.error is None and one.token_ids == other.token_ids
    pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4


def check_idle(llm: LLM) -> None:
    llm._engine.step()
    while llm.stats().pages_in_transit:  # the disk is at work
        llm._engine.mover.wait(1.0)
        llm._engine.step()
    stats = llm.stats()
    assert stats.pages_used == stats.pages_in_transit == 0 and stats.pages_free + stats.pages_cached == llm.num_pages
    llm._engine.scheduler.check()


@pytest.mark.parametrize(
    ("host", "settings"),
    [
        (0, {}), (4, {}), (100, {}), (4, {"demote": "all"}), (4, {"overlap": False}), (4, {"eviction": "cost"}),
        (4, {"tensor": 2}), (4, {"tensor": 4}), (4, {"data": 2, "num_pages": 28}),
    ],
)  # fmt: skip
def test_warm_is_cold_over_all_tiers_under_forced_evictions(tmp_path, model, cold, host: int, settings: dict[str, Any]):
    """The pool holds two prompts of five."""
    llm = LLM.load(model, **SETTINGS | settings, cache_dir=tmp_path, host_cache_bytes=host * FILE)
    rng = random.Random(0)
    for _ in range(4):
        for number in rng.sample(range(5), 5):
            keep = None if "demote" in settings else KEEP
            check_same(llm.generate([PROMPTS[number]], PARAMS, cache_control=keep)[0], cold[number])
    check_idle(llm)
    stats = llm.stats()
    assert stats.num_demoted_pages > 0 and stats.num_unreadable_pages == 0
    assert stats.num_host_hit_pages > 0 or not host  # without a budget a page may still be met before it is written
    assert (stats.num_disk_hit_pages > 0) is (host < 100)
    assert stats.pages_on_host * stats.page_bytes <= host * FILE and stats.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("kv_dtype", "tensor"),
    [
        ("float32", 4),
        ("bfloat16", 1),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("float32", 1),
                ("float32", 2),
                ("bfloat16", 4),
                ("float8_e4m3fn", 2),
            )
        ),
    ],
)
def test_another_start_on_other_devices_reads_the_same_files(tmp_path, model, kv_dtype: str, tensor: int):
    """Written by one device; four devices hold two copies of each KV head."""
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path, kv_dtype=kv_dtype)
    saved = llm.save_prefix(PROMPTS[0])
    assert (saved.num_tokens, saved.num_pages) == (40, 5)
    (before,) = llm.generate([PROMPTS[0]], PARAMS)
    other = LLM.load(model, **SETTINGS, cache_dir=tmp_path, kv_dtype=kv_dtype, tensor=tensor)
    (after,) = other.generate([PROMPTS[0]], PARAMS)
    assert after.cached_tokens == 40 and other.stats().num_disk_hit_pages == 5
    check_same(after, before)
    check_idle(other)


PROCESS = """
    import json, sys
    from jaxkv import LLM, SamplingParams
    model, folder, settings, prompt = json.loads(sys.argv[1])
    llm = LLM.load(model, cache_dir=folder, **settings)
    (out,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.7, seed=5, ignore_eos=True))
    print(json.dumps([out.outputs[0].token_ids, out.cached_tokens, llm.stats().num_disk_hit_pages]))
"""


def test_a_second_process_finds_what_the_first_one_saved(tmp_path, model, cold):
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path)
    llm.save_prefix(PROMPTS[1], ttl="24h")
    args = json.dumps([str(model), str(tmp_path), SETTINGS, PROMPTS[1]])
    code = "\n".join(line.strip() for line in PROCESS.splitlines())
    done = subprocess.run([sys.executable, "-c", code, args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [list(cold[1].outputs[0].token_ids), 40, 5]


def test_other_weights_or_settings_find_nothing(tmp_path, model):
    LLM.load(model, **SETTINGS, cache_dir=tmp_path / "cache").save_prefix(PROMPTS[0])
    config = hf_config()
    other = write_hf(tmp_path / "other", config, random_tensors(config, seed=1))
    for where, changes in (
        (other, {}), (model, {"page_size": 4, "num_pages": 28}), (model, {"kv_dtype": "bfloat16"}),
        (model, {"dtype": "bfloat16", "kv_dtype": "float32"}),
    ):  # fmt: skip
        llm = LLM.load(where, **SETTINGS | changes, cache_dir=tmp_path / "cache")
        assert llm.stats().pages_on_disk == 0
        assert llm.generate([PROMPTS[0]], PARAMS)[0].cached_tokens == 0


def test_damaged_files_are_computed_again(tmp_path, model, cold, caplog):
    LLM.load(model, **SETTINGS, cache_dir=tmp_path).save_prefix(PROMPTS[0])
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) == 5 and files[0].stat().st_size == FILE
    rng, whole = random.Random(0), [path.read_bytes() for path in files]
    for trial in range(8):
        llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path)  # knows them, as they were
        for path, data in zip(files, whole, strict=True):
            at = rng.randrange(len(data))
            path.write_bytes(data[:at] if trial % 2 else data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            check_same(llm.generate([PROMPTS[0]], PARAMS)[0], cold[0])
        assert len([record for record in caplog.records if "page cache" in record.message]) == 1
        assert llm.stats().num_disk_hit_pages == 0
        for path, data in zip(files, whole, strict=True):
            path.write_bytes(data)


def test_salts_stay_apart_on_disk(tmp_path, model):
    LLM.load(model, **SETTINGS, cache_dir=tmp_path).save_prefix(PROMPTS[0], cache_salt="x")
    for salt, cached in (("", 0), ("y", 0), ("x", 40)):
        llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path)
        assert llm.generate([PROMPTS[0]], PARAMS, cache_salt=salt)[0].cached_tokens == cached


def test_a_disk_budget_holds_and_a_prefix_that_exceeds_it_is_refused(tmp_path, model):
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path, disk_cache_bytes=7 * FILE)
    for prompt in PROMPTS:
        llm.save_prefix(prompt)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 7 * FILE
    small = LLM.load(model, **SETTINGS, cache_dir=tmp_path / "small", disk_cache_bytes=3 * FILE)
    with pytest.raises(CapacityError, match="its budget holds 3 pages; raise disk_cache_bytes"):
        small.save_prefix(PROMPTS[0])
    check_idle(small)


def test_a_prefix_is_saved_beside_requests_that_run(tmp_path, model, cold):
    """One of them with the same prompt; the pool has no room for the second one's until the first has ended."""
    llm = LLM.load(model, **SETTINGS | {"num_pages": 13}, cache_dir=tmp_path)
    builder = llm.enqueue(llm.prepare(PROMPTS[0], PARAMS))
    llm.step()
    assert llm.save_prefix(PROMPTS[0]).num_pages == 5 and llm.save_prefix(PROMPTS[1]).num_pages == 5
    assert builder.output is not None
    check_same(builder.output, cold[0])
    with pytest.raises(RequestError, match="max_len"):
        llm.save_prefix(PROMPTS[0] * 3)
    check_idle(llm)


def test_a_device_that_fails_while_a_prefix_is_saved(tmp_path, model, cold, monkeypatch):
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path)
    llm.generate([PROMPTS[0]], PARAMS)

    def fail(pages: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "read_pages", fail)
        with pytest.raises(CapacityError, match="0 of 5 pages"):
            llm.save_prefix(PROMPTS[0])
    check_idle(llm)
    assert llm.save_prefix(PROMPTS[0]).num_pages == 5
    check_same(llm.generate([PROMPTS[0]], PARAMS)[0], cold[0])


def test_an_unwritable_folder_is_a_warning_and_the_engine_lives(tmp_path, model, cold, caplog):
    (tmp_path / "file").write_text("not a folder")
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path / "file")
    for _ in range(2):
        for number in range(5):
            check_same(llm.generate([PROMPTS[number]], PARAMS, cache_control=KEEP)[0], cold[number])
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    assert llm.stats().num_dropped_pages > 0 and llm.stats().pages_on_disk == 0
    with pytest.raises(CapacityError, match="0 of 5 pages"):
        llm.save_prefix(PROMPTS[0])
    check_same(llm.generate([PROMPTS[0]], PARAMS)[0], cold[0])


def test_nothing_compiles_after_warm_up(tmp_path, model):
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path, host_cache_bytes=4 * FILE, warm_up=True)
    before = llm.stats().num_compiles
    for _ in range(20):  # on a busy machine pages reach the disk late
        for prompt in PROMPTS:
            llm.generate([prompt], PARAMS, cache_control=KEEP)
        if llm.stats().num_disk_hit_pages:
            break
    assert llm.stats().num_disk_hit_pages > 0 and llm.stats().num_compiles == before
    assert "read_pages" not in LLM.load(model, **SETTINGS, warm_up=True)._engine.runner.num_traces, "only with tiers"


def test_what_cannot_be_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match="disk_cache_bytes=5 needs a folder; give cache_dir"):
        LLM.load(model, **SETTINGS, disk_cache_bytes=5)
    with pytest.raises(ConfigError, match=r"host_cache_bytes=5 holds no page of 4,128 bytes; raise it, or give 0"):
        LLM.load(model, **SETTINGS, host_cache_bytes=5)
    with pytest.raises(ConfigError, match="need the prefix cache"):
        LLM.load(model, **SETTINGS, host_cache_bytes=10**6, prefix_cache=False)
    with pytest.raises(ConfigError, match="demote='some' must be one of retained, all"):
        LLM.load(model, **SETTINGS, cache_dir=tmp_path, demote="some")
    with pytest.raises(RequestError, match="save_prefix needs a folder for its pages; load with cache_dir"):
        LLM.load(model, **SETTINGS, host_cache_bytes=10**6).save_prefix(PROMPTS[0])
    llm = LLM.load(model, **SETTINGS, cache_dir=tmp_path)
    assert llm.save_prefix(PROMPTS[0][:7]).num_pages == 0, "no full page"
    with pytest.raises(RequestError, match="ttl='soon'"):
        llm.save_prefix(PROMPTS[0], ttl="soon")

"""Random lives of requests over three tiers: whatever moves, fails, is damaged or killed, outputs are those made alone.

The fake runner's K/V are read through page tables, so a page that came up wrong, stale or under another key changes
everything after it. Few letters make shared prefixes common, small budgets make every tier overflow.
"""

import contextlib
import dataclasses
import random
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.stateful
import hypothesis.strategies as st
import pytest

from jaxkv.cache.tier_files import HEADER_BYTES
from jaxkv.config import SchedulerConfig
from jaxkv.errors import CapacityError
from jaxkv.schedule.holds import Hold
from tests.fake_model import make_prompt, make_request, small_config
from tests.host.test_scheduler_properties import BASE, SchedulerMachine, configs
from tests.host.tier_stage import Below, check_bytes, tiers

PLACES = st.integers(0, 2000) | st.just(HEADER_BYTES + 3)  # to damage a file; the second is among its K/V


@st.composite
def tiered(draw: st.DrawFn) -> SchedulerConfig:
    config = draw(configs())
    num_pages = -(-config.max_len // config.page_size)
    below = tiers(
        host_pages=draw(st.sampled_from([0, 0, 1, 3, 20])),
        disk_pages=draw(st.sampled_from([1, 4, 50])),
        max_outgoing=draw(st.sampled_from([1, 4, 50])),
        max_staged=num_pages,
        demote=draw(st.sampled_from(["retained", "all", "all"])),
    )
    return dataclasses.replace(config, tiers=below, prefix_cache=True, windows=(None,))


def damage(path: Path, at: int, flip: int) -> None:
    """Flips bits of one byte, or cuts the file there."""
    data = bytearray(path.read_bytes())
    at %= max(len(data), 1)
    if flip and data:
        data[at] ^= flip
    path.write_bytes(data if flip else data[:at])


class TierMachine(SchedulerMachine):
    """What `SchedulerMachine` does, over host memory and a disk that is slow, full, damaged and survives."""

    @hypothesis.stateful.initialize(config=tiered(), depth=st.integers(1, 3), at_once=st.booleans())
    def start(self, config: SchedulerConfig, depth: int, at_once: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.stage = Below(config, Path(self.folder.name), at_once, depth)
        self.loop = self.stage.start()
        self.num_added = 0

    @hypothesis.stateful.rule(num=st.integers(1, 4))
    def disk_works(self, num: int) -> None:
        self.stage.store.work(num)

    @hypothesis.stateful.rule(is_full=st.booleans())
    def disk_fills(self, is_full: bool) -> None:
        self.stage.folder.is_full = is_full

    @hypothesis.stateful.rule(length=st.integers(1, len(BASE)), ttl_s=st.sampled_from([None, 2.0, 100.0]))
    def save(self, length: int, ttl_s: float | None) -> None:
        self.loop.scheduler.save(make_request("saved", BASE[:length]), ttl_s)

    @hypothesis.stateful.rule(
        which=st.integers(0, 100),
        at=st.integers(0, 2000) | st.just(HEADER_BYTES + 3),
        flip=st.sampled_from([0, 1, 128]),
    )
    def damage_file(self, which: int, at: int, flip: int) -> None:
        if files := self.stage.files():
            damage(files[which % len(files)], at, flip)

    @hypothesis.stateful.rule(which=st.integers(0, 100))
    def lose_file(self, which: int) -> None:
        if files := self.stage.files():
            files[which % len(files)].unlink()

    @hypothesis.stateful.rule()
    def kill(self) -> None:
        """The process dies where it stands; what it answered until then was right."""
        self.loop.check_against_alone()
        self.loop = self.stage.start()
        self.num_added = 0

    @hypothesis.stateful.rule()
    def bytes_are_where_they_should_be(self) -> None:
        check_bytes(self.loop)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        super().teardown()
        self.stage.store.work()
        check_bytes(self.loop)
        assert len(self.stage.files()) <= self.stage.config.tiers.disk_pages + self.num_damaged()
        self.folder.cleanup()

    def num_damaged(self) -> int:
        """Files that are no good stay, and the tiers do not know them."""
        known = {key.hex() for key in self.loop.scheduler.tiers.disk.all_keys()}
        return sum(path.stem not in known for path in self.stage.files())


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)


class Storm:
    """Random operations without end, by a seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.num_requests = 0
        self.totals: dict[str, int] = {}
        self._start_elsewhere()

    def run(self, num: int) -> None:
        names = [
            "add",
            "step",
            "step",
            "step",
            "abort",
            "time",
            "disk",
            "save",
            "clear",
            "full",
            "damage",
            "idle",
            "kill",
            "hold",
            "fail",
        ]
        weights = [30, 60, 40, 20, 4, 2, 30, 3, 0.1, 0.3, 6, 1, 0.3, 2, 0.2]
        for name in self.rng.choices(names, weights, k=num):
            getattr(self, name)()

    def add(self) -> None:
        rng, name = self.rng, str(self.num_requests)
        self.num_requests += 1
        prompt = [*make_prompt(rng.choice([3, 8, 16, 24, 28]), rng.randrange(5)), rng.randrange(3)]
        marks = rng.choice([(), ((4, 9.0),), ((16, 500.0),), ((4, 50.0), (len(prompt), 200.0))])
        with contextlib.suppress(CapacityError):
            self.loop.add(
                make_request(
                    name, prompt, max_tokens=rng.randrange(1, 8), n=rng.choice([1, 1, 1, 2, 3]), marks=marks,
                    salt=rng.choice(["", "", "x"]), seed=rng.randrange(3), ignore_eos=True,
                )
            )  # fmt: skip

    def step(self) -> None:
        self.loop.step()

    def abort(self) -> None:
        self.loop.scheduler.abort(str(self.rng.randrange(max(self.num_requests - 6, 0), self.num_requests + 1)))

    def hold(self) -> None:
        """A session begins or ends."""
        holds, rng = self.loop.scheduler.holds, self.rng
        if self.holds and rng.random() < len(self.holds) / 4:
            holds.end(self.holds.pop(rng.randrange(len(self.holds))))
        else:
            prompt = make_prompt(rng.choice([8, 16, 24]), rng.randrange(5))
            self.holds.append(holds.take(prompt, rng.choice(["", "", "x"])))

    def fail(self) -> None:
        """The device fails, before or after what was planned with the newest step was carried out."""
        if self.rng.random() < 0.5:
            self.loop.scheduler.plan(self.loop.now_s)
        self.loop.fail()

    def time(self) -> None:
        self.loop.now_s += self.rng.choice([1.0, 5.0, 30.0])

    def disk(self) -> None:
        self.stage.store.work(self.rng.randrange(1, 4))

    def save(self) -> None:
        ttl_s = self.rng.choice([None, 10.0])
        self.loop.scheduler.save(make_request("saved", make_prompt(24, self.rng.randrange(5))), ttl_s)

    def clear(self) -> None:
        self.loop.scheduler.clear_cache()

    def full(self) -> None:
        self.stage.folder.is_full = not self.stage.folder.is_full

    def damage(self) -> None:
        if files := self.stage.files():
            at = self.rng.choice([self.rng.randrange(4000), HEADER_BYTES + self.rng.randrange(32)])  # often in its K/V
            damage(self.rng.choice(files), at, self.rng.choice([0, 1, 64, 64]))

    def idle(self) -> None:
        """All that runs ends: every page came back, every output is right."""
        loop = self.loop
        loop.drain()
        loop.check_against_alone()
        check_bytes(loop)
        loop.scheduler.check()
        stats, config = loop.scheduler.stats(), self.stage.config
        assert stats.pages_used == 0
        assert stats.pages_free + stats.pages_cached == (config.num_pages - 1) * config.num_shards
        for name in ("num_demoted_pages", "num_host_hit_pages", "num_disk_hit_pages", "num_unreadable_pages"):
            self.totals[name] = self.totals.get(name, 0) + getattr(stats, name)
        self._fresh()  # what was checked need not be checked again

    def kill(self) -> None:
        self.loop.check_against_alone()
        self._start_elsewhere()

    def _fresh(self) -> None:
        for gone in (self.loop.requests, self.loop.finished, self.loop.streamed, self.loop.logprobs, self.loop.plans):
            gone.clear()
        counts = self.loop.scheduler.tiers.counts
        for field in dataclasses.fields(counts):
            setattr(counts, field.name, 0)

    def _start_elsewhere(self) -> None:
        """A new process with other sizes, on the same folder; of pages of other sizes it knows nothing."""
        rng = self.rng
        config = small_config(
            max_len=36, num_pages=rng.choice([10, 10, 12, 14]), max_rows=rng.choice([2, 4]), page_size=4,
            token_budget=rng.choice([8, 24]), eviction=rng.choice(["lru", "cost"]), num_shards=rng.choice([1, 1, 2]),
            tiers=tiers(
                host_pages=rng.choice([0, 2, 4, 8]), disk_pages=rng.choice([3, 12, 40]),
                max_outgoing=rng.choice([2, 50]), max_staged=9, demote=rng.choice(["retained", "all"]),
            ),
        )  # fmt: skip
        self.holds: list[Hold] = []
        self.stage = Below(config, self.folder, at_once=rng.random() < 0.3)
        self.loop = self.stage.start()


def check_storm(folder: Path, seed: int, num: int) -> None:
    storm = Storm(folder, seed)
    storm.run(num)
    storm.idle()
    print(f"{num} operations, {storm.num_requests} requests, {storm.totals}")
    assert min(storm.totals.values()) > 0, storm.totals


def test_random_operations(tmp_path):
    check_storm(tmp_path, seed=0, num=4_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_random_operations(tmp_path):
    check_storm(tmp_path, seed=1, num=100_000)

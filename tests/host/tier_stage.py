"""Lower tiers for the fake runner: real files, and threads that a test runs by hand."""

import collections
import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.cache.prefix_cache import root_key
from jaxkv.cache.tier_files import PageFolder, PageFormat
from jaxkv.cache.tier_store import TierStore
from jaxkv.config import SchedulerConfig, TierConfig
from jaxkv.plan import PageNote
from tests.fake_model import make_request
from tests.fake_runner import Loop, run


def page_format(config: SchedulerConfig, namespace: bytes = b"") -> PageFormat:
    """Of the fake runner's pages: one uint64 a token."""
    return PageFormat(
        root=root_key(namespace), model="fake", kv_dtype="uint64", shape=(1, 1, 1, config.page_size, 1),
        bits=np.dtype("<u8"),
    )  # fmt: skip


class Hands(Executor):
    """Runs a job when it is told to; `at_once` does so when it is submitted."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.jobs: collections.deque[Callable[[], Any]] = collections.deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(lambda: fn(*args, **kwargs))
        if self.at_once:
            self.work()
        return Future()

    def work(self, num: int = 10**9) -> None:
        """The next `num` jobs."""
        for _ in range(min(num, len(self.jobs))):
            self.jobs.popleft()()


class BrokenFolder(PageFolder):
    """A disk that may be full."""

    is_full = False

    def write(self, key: bytes, note: PageNote, kv: np.ndarray) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().write(key, note, kv)


class HandStore(TierStore):
    """A store whose disk works only when it is told to, or waited for."""

    def __init__(self, folder: PageFolder, *, at_once: bool = True) -> None:
        self.hands: dict[str, Hands] = {}
        super().__init__(folder, self._make)
        self.hands["writing"].at_once = self.hands["reading"].at_once = at_once

    def _make(self, name: str, num: int) -> Executor:
        self.hands[name] = Hands(at_once=True)
        return self.hands[name]

    def work(self, num: int = 10**9) -> None:
        for name in ("writing", "reading"):
            self.hands[name].work(num)

    def wait(self, timeout_s: float) -> None:
        self.work()


@dataclasses.dataclass
class Below:
    """A loop with lower tiers in `folder`, and how to start it again."""

    config: SchedulerConfig
    cache_dir: Path
    at_once: bool = True
    depth: int = 2

    def start(self) -> Loop:
        """A new process, as far as the fake runner can tell."""
        self.folder = BrokenFolder(self.cache_dir, page_format(self.config))
        self.store = HandStore(self.folder, at_once=self.at_once)
        loop = Loop(self.config, depth=self.depth, store=self.store)
        loop.scheduler.tiers.restore(self.folder.scan(), loop.now_s)
        return loop

    def files(self) -> list[Path]:
        return sorted(self.folder.folder.glob("*.kv")) if self.folder.folder.exists() else []


def tiers(**changes: Any) -> TierConfig:
    return TierConfig(**(dict(max_outgoing=1000, max_staged=16) | changes))


def ask(loop: Loop, prompt: list[int], **changes: Any) -> int:
    """Sends a prompt, and checks its output; returns how many of its tokens were cached."""
    name = f"asks {len(loop.requests)}"
    run(loop, make_request(name, prompt, **(dict(max_tokens=3) | changes)))
    return loop.finished[name, 0].cached_tokens


def check_bytes(loop: Loop) -> None:
    """The store holds what the tiers think it holds, and budgets hold."""
    for _ in range(2):  # the news of what the first round does
        loop.mover.report()
        loop.mover.move()
    kept = loop.scheduler.tiers
    kept.check()
    known = {*kept.host.all_keys(), *kept._outgoing, *kept._staged}
    assert {*loop.mover.store._pages} == known, (len(loop.mover.store._pages), len(known))

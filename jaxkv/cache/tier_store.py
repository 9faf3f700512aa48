"""The bytes of the lower tiers: pages in host memory, and the threads that move them to and from disk.

It does what `tiers` decided and tells what became of it. Nothing here waits for a disk or a device but `get`: pages that come
from the device land in a thread, files are written in another, in the order asked for, and read in a third.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from jaxkv.cache.tier_files import PageFileError, PageFolder
from jaxkv.plan import MoveKind, MoveNews, PageNote

log = logging.getLogger(__name__)

NUM_READERS = 2  # checksums and copies of one overlap with the other's waiting


class Arriving(Protocol):
    """Pages on their way from the device."""

    def result(self) -> np.ndarray:
        """Waits for them: [num, ...]."""
        ...


class TierStore:
    """Pages by key. All methods are called from the engine's thread.

    Args:
        folder: of the disk tier; None: there is none.
        executor: makes the threads, given a name and how many; for tests.
    """

    def __init__(self, folder: PageFolder | None, executor: Callable[[str, int], Executor] | None = None) -> None:
        make = executor or (lambda name, num: ThreadPoolExecutor(num, thread_name_prefix=f"jaxkv-{name}"))
        self.folder = folder
        self._landing, self._writing = make("landing", 1), make("writing", 1)
        self._reading = make("reading", NUM_READERS)
        self._pages: dict[bytes, Future[np.ndarray]] = {}
        self._news: list[tuple[MoveNews, Future[np.ndarray]]] = []
        self._has_news = threading.Condition()
        self._num_busy = 0  # WRITEs, READs and KEEPs that are not done
        self._has_warned = False

    @property
    def is_busy(self) -> bool:
        """Whether the disk is at work, or news is to be taken."""
        with self._has_news:
            return self._num_busy > 0 or bool(self._news)

    def take_news(self) -> list[MoveNews]:
        """What became of moves since the last call."""
        with self._has_news:
            news, self._news = self._news, []
        known = []
        for one, page in news:
            if self._pages.get(one.key) is not page:
                continue  # from before a reset
            known.append(one)
            if one.kind is MoveKind.READ and not one.is_done:
                del self._pages[one.key]
        return known

    def wait(self, timeout_s: float) -> None:
        """Until there is news, or nothing to wait for, or time is up."""
        with self._has_news:
            self._has_news.wait_for(lambda: bool(self._news) or not self._num_busy, timeout_s)

    def reset(self) -> None:
        """Forgets every page in host memory, and what is still to come of it."""
        self._pages.clear()

    def land(self, keys: Sequence[bytes], arriving: Arriving) -> None:
        """Takes in pages that are on their way from the device, in the order of `keys`."""
        pages: list[Future[np.ndarray]] = [Future() for _ in keys]
        self._pages.update(zip(keys, pages, strict=True))
        self._landing.submit(self._land, keys, arriving, pages)

    def get(self, key: bytes) -> np.ndarray:
        """A page that is in host memory, or on its way there."""
        return self._pages[key].result()

    def drop(self, key: bytes) -> None:
        """Forgets a page; harmless if it is not there."""
        self._pages.pop(key, None)

    def write(self, key: bytes, note: PageNote) -> None:
        """Writes a page to disk, as soon as it has landed."""
        page = self._pages[key]
        with self._has_news:
            self._num_busy += 1
        self._writing.submit(self._write, key, note, page)

    def keep(self, key: bytes, note: PageNote) -> None:
        """Has a page's file say what `note` says, after what was asked for before; there is no news of it."""
        with self._has_news:
            self._num_busy += 1
        self._writing.submit(self._keep, key, note)

    def unlink(self, key: bytes) -> None:
        """Removes a page's file, after what was asked for before."""
        if self.folder is not None:
            self._writing.submit(self.folder.unlink, key)

    def read(self, key: bytes) -> None:
        """Reads a page into host memory."""
        page: Future[np.ndarray] = Future()
        self._pages[key] = page
        with self._has_news:
            self._num_busy += 1
        self._reading.submit(self._read, key, page)

    def _land(self, keys: Sequence[bytes], arriving: Arriving, pages: list[Future[np.ndarray]]) -> None:
        try:
            arrays = arriving.result()
            for page, array in zip(pages, arrays, strict=True):
                page.set_result(array.copy())  # alone: one page that stays must not keep the others
        except Exception as error:
            log.warning("%d pages were lost on the way from the device: %s", len(keys), error)
            for key, page in zip(keys, pages, strict=True):
                if not page.done():
                    page.set_exception(error)
                    self._tell(MoveNews(MoveKind.DOWN, key, False), page, was_busy=False)

    def _write(self, key: bytes, note: PageNote, page: Future[np.ndarray]) -> None:
        is_done = False
        try:
            assert self.folder is not None
            self.folder.write(key, note, page.result())
            is_done = True
        except OSError as error:
            self._warn(error)
        except Exception:  # the page never landed, which was said
            log.debug("not writing %s", key.hex(), exc_info=True)
        finally:
            self._tell(MoveNews(MoveKind.WRITE, key, is_done), page)

    def _keep(self, key: bytes, note: PageNote) -> None:
        try:
            assert self.folder is not None
            self.folder.write(key, note, self.folder.read(key))
        except OSError as error:
            self._warn(error)
        except PageFileError:  # whoever wants to read it will hear of it
            log.debug("not keeping %s", key.hex(), exc_info=True)
        finally:
            with self._has_news:
                self._num_busy -= 1
                self._has_news.notify_all()

    def _read(self, key: bytes, page: Future[np.ndarray]) -> None:
        try:
            assert self.folder is not None
            page.set_result(self.folder.read(key))
        except Exception as error:
            if not isinstance(error, PageFileError):
                log.exception("reading page %s failed", key.hex())
            page.set_exception(error)
        finally:
            self._tell(MoveNews(MoveKind.READ, key, page.exception() is None), page)

    def _tell(self, news: MoveNews, page: Future[np.ndarray], *, was_busy: bool = True) -> None:
        with self._has_news:
            self._news.append((news, page))
            self._num_busy -= was_busy
            self._has_news.notify_all()

    def _warn(self, error: OSError) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        log.log(level, "the page cache cannot be written: %s; pages that do not fit into memory are lost", error)

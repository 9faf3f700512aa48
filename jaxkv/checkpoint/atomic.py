"""Folders that are there completely or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxkv.errors import CheckpointError


def check_new(target: Path) -> None:
    """Refuses a folder that is there already.

    Raises:
        CheckpointError: it is.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already; delete it or choose another name")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which becomes `target` when the block ends without an error.

    After an error the folder is removed. A process that is killed leaves `.<name>.partial` behind; the next one that
    writes the same target takes it over and empties it. A lock on it keeps two living processes apart.

    Raises:
        CheckpointError: `target` exists, cannot be written, or another process is writing it.
    """
    check_new(target)
    partial = target.parent / f".{target.name}.partial"
    with contextlib.ExitStack() as stack:
        try:
            lock = _claim(partial)
        except BlockingIOError as error:
            raise CheckpointError(f"{target} is being written by another process (it holds {partial})") from error
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
        stack.callback(os.close, lock)  # also gives up the lock
        try:
            yield partial
            _finish(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _claim(partial: Path) -> int:
    """Makes the folder, or takes over a dead process's, empty; returns the descriptor that holds the lock on it."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
                for entry in partial.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # between the two calls its owner finished and renamed it: try again


def _finish(partial: Path, target: Path) -> None:
    try:
        _sync(partial)
        partial.rename(target)  # fails if something was put there meanwhile
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{target} cannot be written: {reason}; nothing was left behind") from error
    with contextlib.suppress(OSError):  # the folder is there and whole; only a crash right now could undo the rename
        _sync_one(target.parent)


def _sync(folder: Path) -> None:
    """Forces everything in a folder to the disk, so that the rename never arrives there first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync_one(Path(root, name))
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

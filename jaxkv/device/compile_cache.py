"""Compiled programs kept on disk between processes, and kept whole.

jax writes an entry straight into its place, and never writes one that exists, so what a killed process was writing would
stay broken for good. Each process therefore leaves a marker while it lives; the next one that finds a dead process's
marker drops every entry written since.
"""

import atexit
import contextlib
import logging
import os
from pathlib import Path

import jax

log = logging.getLogger(__name__)

_markers: set[Path] = set()  # that this process has left


def use_compilation_cache(folder: Path) -> bool:
    """Keeps compiled programs in `folder`; False if jax is configured otherwise, or the folder cannot be written."""
    if jax.config.jax_compilation_cache_dir not in (None, str(folder)):  # pyright: ignore[reportAttributeAccessIssue]
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drop_half_written(folder)
        marker = folder / f"writing-{os.getpid()}"
        if marker not in _markers:
            marker.touch()
            atexit.register(marker.unlink, missing_ok=True)
            _markers.add(marker)
    except OSError as error:
        log.warning("not keeping compiled programs (%s); set JAXKV_CACHE_DIR to a folder that can be written", error)
        return False
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return True


def drop_half_written(folder: Path) -> None:
    """Removes entries that were written since a process began which did not end by itself."""
    dead = [marker for marker in folder.glob("writing-*") if not _is_alive(marker)]
    for marker in dead:
        with contextlib.suppress(FileNotFoundError):  # another process may be doing the same
            since = marker.stat().st_mtime
            for entry in folder.glob("*-cache"):
                if entry.stat().st_mtime >= since:
                    entry.unlink(missing_ok=True)
            marker.unlink(missing_ok=True)


def _is_alive(marker: Path) -> bool:
    """Whether the process that left the marker still runs."""
    pid = int(marker.name.removeprefix("writing-"))
    if pid == os.getpid():  # else of one before with the same id: in a container each start may have 1
        return marker in _markers
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

"""Step programs kept on disk as executables, so that a second start neither traces nor compiles them.

jax's own compilation cache saves only the compiler's time; tracing and lowering a step cost as much again (0.5-0.7 s of
0.9 s a program). An entry's name is a digest of everything that went into it: the source of this package, versions,
device, settings and shapes. An entry that cannot be read is made anew.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxkv.errors import ConfigError

log = logging.getLogger(__name__)

MAX_ENGINES = 8  # folders kept, by last use; one holds the programs of one model under one set of settings
PACKAGES = ("jaxkv", "kernels_pallas")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# jax's settings that no program depends on, by their beginnings; all others count, as new ones come with each version.
HARMLESS = (
    "jax_log", "jax_explain", "jax_debug_log", "jax_traceback", "jax_pprint", "jax_dump", "jax_enable_compilation_cache",
    "jax_compilation_cache", "jax_persistent_cache", "jax_raise_persistent_cache",
)  # fmt: skip


class ProgramCache:
    """Executables of one engine, in a folder of their own."""

    def __init__(self, root: Path, devices: Sequence[Any], *facts: object):
        """
        Args:
            root: holds a folder per engine; only this user may write there, since entries are pickles.
            devices: the `jax.Device`s that the programs run on.
            facts: all that the programs are made from besides their arguments; their `repr` counts.

        Raises:
            ConfigError: another user may write to `root`.
        """
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(root)
        self._devices = list(devices)
        digest = hashlib.sha256(repr((*_surroundings(), self._devices, *facts)).encode()).hexdigest()[:32]
        self.folder = root / digest
        self.folder.mkdir(exist_ok=True)
        os.utime(self.folder)
        _drop_oldest(root)

    def program(self, name: str, jitted: Any, *, num_fixed: int) -> Callable[..., Any]:
        """`jitted` as a callable that compiles at most once per shape of its arguments, over all processes.

        Args:
            name: part of the entry's name.
            jitted: from `jax.jit`.
            num_fixed: leading arguments whose shapes never change; the others are arrays.
        """
        loaded: dict[tuple[tuple[int, ...], ...], Any] = {}

        def call(*args: Any) -> Any:
            shapes = tuple(np.shape(arg) for arg in args[num_fixed:])
            executable = loaded.get(shapes)
            if executable is None:
                executable = loaded[shapes] = self._get(name, jitted, args)
            return executable(*args)

        return call

    def _get(self, name: str, jitted: Any, args: Sequence[Any]) -> Any:
        digest = hashlib.sha256(repr((_settings(), jax.tree.map(_describe, args))).encode()).hexdigest()[:32]
        path = self.folder / f"{name}-{digest}"
        try:
            entry = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(*entry, execution_devices=self._devices)
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a damaged or foreign entry raises, the way out is the same
            log.warning("dropping the unreadable program %s: %s", path, error)
        with _without_jax_cache():
            executable = jitted.lower(*args).compile()
        try:
            _write(path, pickle.dumps(serialize_executable.serialize(executable)))
        except Exception as error:  # a back end that cannot serialise, a full disk: the program itself is fine
            log.info("not keeping program %s: %s", path, error)
        return executable


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """XLA:CPU cannot serialise again what came out of jax's own cache: its functions would be missing."""
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers the switch
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _check_private(root: Path) -> None:
    """Entries are pickles: who can write one can run code as whoever reads it."""
    if not hasattr(os, "getuid"):
        return
    status = root.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"{root} belongs to another user; set JAXKV_CACHE_DIR to a folder of yours")
    if status.st_mode & 0o022:
        raise ConfigError(
            f"other users may write to {root}; run chmod go-w on it, or set JAXKV_CACHE_DIR to another folder"
        )


def _describe(array: Any) -> str:
    return f"{jax.typeof(array)} {getattr(array, 'sharding', None)} {getattr(array, 'committed', None)}"


@functools.cache
def _surroundings() -> tuple[object, ...]:
    """What an executable depends on besides the engine."""
    source = hashlib.sha256()
    here = Path(__file__).parents[2]
    for file in sorted(file for package in PACKAGES for file in (here / package).rglob("*.py")):
        source.update(f"{file.relative_to(here)}\n".encode() + file.read_bytes())
    devices = [(d.platform, d.device_kind, d.id) for d in jax.devices()]
    flags = [os.environ.get(name) for name in FLAGS]
    versions = (platform.python_version(), jax.__version__, importlib.metadata.version("jaxlib"), flax.__version__)
    driver = jax.devices()[0].client.platform_version
    return (source.hexdigest(), versions, driver, devices, flags, _cpu_features())


def _settings() -> dict[str, Any]:
    """jax's own, now: they may change at any time, and tracing reads them."""
    values: dict[str, Any] = jax.config.values  # pyright: ignore[reportAttributeAccessIssue]
    return {name: value for name, value in sorted(values.items()) if not name.startswith(HARMLESS)}


def _cpu_features() -> str:
    """XLA:CPU compiles for the processor at hand."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0] if lines else "")


def _write(path: Path, data: bytes) -> None:
    """In one piece or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _drop_oldest(root: Path) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=_last_use)
    for folder in folders[:-MAX_ENGINES]:
        shutil.rmtree(folder, ignore_errors=True)


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process dropped it just now
        return 0.0

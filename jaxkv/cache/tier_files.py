"""The disk tier's files: one page each, named by its key, in a folder for each namespace.

    <cache_dir>/<root key, 32 hex digits>/<page key, 64 hex digits>.kv

    magic and version         8 bytes
    header                    1016 bytes: JSON, padded with spaces
    K/V                       [L, 2, K, S, D], bits of the K/V dtype, little-endian
    SHA-256 of all the above  32 bytes

One file a page, not a run of pages: a key names a whole prefix, so prompts that begin alike share their files with no
book-keeping, each page is evicted by itself, and a write that fails loses one page. A page takes hundreds of kilobytes
(SmolLM2 in float32: 737 kB), so opening one costs little beside reading it.

A file appears under its name only when it is whole and on the disk (written aside, synced, renamed). What is torn, flipped,
of another version, layout or namespace is never used: it is ignored, with one warning for a folder. The content is
canonical, the same for every device and split (`page_transfer`).
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.cache.tier import OnDisk
from jaxkv.plan import PageNote

log = logging.getLogger(__name__)

MAGIC = b"jaxkvpg\x01"  # the last byte is the version
HEADER_BYTES, DIGEST_BYTES = 1024, 32  # the first with the magic
SUFFIX, WRITING = ".kv", ".writing-"
ABANDONED_S = 3600.0  # age at which what was never renamed belongs to a process that died
MAX_NAME = 200  # characters of a model's name that a header keeps


class PageFileError(Exception):
    """A page file is missing or not to be used; never leaves the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFormat:
    """What all page files of an engine have in common."""

    root: bytes  # root key of the namespace: model, K/V dtype, page size, rope
    model: str  # its name, for people
    kv_dtype: str
    shape: tuple[int, int, int, int, int]  # [L, 2, K, S, D]
    bits: np.dtype  # unsigned integers of the dtype's width

    @property
    def page_bytes(self) -> int:
        """Of a page in memory."""
        return math.prod(self.shape) * self.bits.itemsize

    @property
    def file_bytes(self) -> int:
        """Of a page on disk."""
        return HEADER_BYTES + self.page_bytes + DIGEST_BYTES

    def facts(self) -> dict[str, Any]:
        """What a header must say for its file to be used."""
        return {"root": self.root.hex(), "kv_dtype": self.kv_dtype, "shape": list(self.shape)}


def encode_header(key: bytes, note: PageNote, page: PageFormat) -> bytes:
    """The first `HEADER_BYTES` of a file."""
    header = page.facts() | {
        "key": key.hex(),
        "parent": note.parent.hex(),
        "index": note.index,
        "ttl_s": note.ttl_s,
        "model": page.model.encode("ascii", "backslashreplace").decode()[-MAX_NAME:],
    }
    text = json.dumps(header).encode()
    assert len(text) <= HEADER_BYTES - len(MAGIC), len(text)
    return MAGIC + text.ljust(HEADER_BYTES - len(MAGIC))


def decode_header(data: bytes) -> dict[str, Any]:
    """The header of a file that begins with `data`.

    Raises:
        PageFileError: it is none of ours, or of another version.
    """
    if data[: len(MAGIC)] != MAGIC:
        is_ours = data[: len(MAGIC) - 1] == MAGIC[:-1]
        raise PageFileError("it has another version" if is_ours else "it is no page file")
    try:
        header = json.loads(data[len(MAGIC) : HEADER_BYTES])
        key, parent = bytes.fromhex(header["key"]), bytes.fromhex(header["parent"])
        is_whole = len(key) == len(parent) == 32 and isinstance(header["index"], int) and header["index"] >= 0
        is_whole &= header["ttl_s"] is None or (isinstance(header["ttl_s"], (int, float)) and header["ttl_s"] > 0)
        is_whole &= all(isinstance(header[name], str) for name in ("root", "kv_dtype", "model"))
        is_whole &= len(header["shape"]) == 5 and all(isinstance(n, int) and n > 0 for n in header["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise PageFileError("its header is damaged") from error
    if not is_whole:
        raise PageFileError("its header is damaged")
    return header


def check_digest(data: bytes) -> None:
    """Raises PageFileError unless the last bytes of a file are the digest of all the others."""
    if hashlib.sha256(memoryview(data)[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
        raise PageFileError("its checksum is wrong")


class PageFolder:
    """The page files of one namespace.

    Args:
        cache_dir: holds a folder for each namespace; made when the first page is written.
        page: what the files have in common.
    """

    def __init__(self, cache_dir: Path, page: PageFormat) -> None:
        self.page = page
        self.folder = cache_dir / page.root.hex()[:32]
        self._has_warned = False

    def path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def scan(self) -> list[OnDisk]:
        """What can be used, by headers and sizes; contents are checked when they are read."""
        found, now_s = [], time.time()
        for path in self._files(now_s):
            try:
                with open(path, "rb") as file:
                    header, status = self._check(path, file.read(HEADER_BYTES)), os.fstat(file.fileno())
                if status.st_size != self.page.file_bytes:
                    raise PageFileError(f"it has {status.st_size} bytes, not {self.page.file_bytes}")
            except (OSError, PageFileError) as error:
                self.warn(path, error)
                continue
            found.append(OnDisk(bytes.fromhex(header["key"]), header["ttl_s"], max(now_s - status.st_mtime, 0.0)))
        return found

    def read(self, key: bytes) -> np.ndarray:
        """A page's K/V, checked as a whole; read-only.

        Raises:
            PageFileError: the file is gone or not to be used; unless it is gone this was said.
        """
        path = self.path(key)
        try:
            data = path.read_bytes()
            self._check(path, data)
            if len(data) != self.page.file_bytes:
                raise PageFileError(f"it has {len(data)} bytes, not {self.page.file_bytes}")
            check_digest(data)
        except FileNotFoundError as error:  # another process made room
            raise PageFileError(f"{path} is gone") from error
        except (OSError, PageFileError) as error:
            self.warn(path, error)
            raise PageFileError(f"{path}: {error}") from error
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used now
        count = math.prod(self.page.shape)
        return np.frombuffer(data, self.page.bits, count, offset=HEADER_BYTES).reshape(self.page.shape)

    def write(self, key: bytes, note: PageNote, kv: np.ndarray) -> None:
        """Writes a page; in one piece or not at all.

        Raises:
            OSError: the disk is full, the folder cannot be written, ...
        """
        assert kv.shape == self.page.shape and kv.dtype == self.page.bits, (kv.shape, kv.dtype)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # K/V tell what a prompt said
        header, body = encode_header(key, note, self.page), np.ascontiguousarray(kv).data.cast("B")
        digest = hashlib.sha256(header)
        digest.update(body)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=WRITING, delete=False) as file:
            try:
                file.write(header)
                file.write(body)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())  # else the name might reach the disk before the content
                os.replace(file.name, self.path(key))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def unlink(self, key: bytes) -> None:
        """Removes a page's file; harmless if it is gone."""
        with contextlib.suppress(OSError):
            self.path(key).unlink(missing_ok=True)

    def warn(self, path: Path, error: Exception) -> None:
        """Says once for the folder that something in it is no good."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        log.log(level, "ignoring %s in the page cache: %s; `jaxkv cache verify` lists all such files", path, error)

    def _files(self, now_s: float) -> Iterator[Path]:
        """Page files in a fixed order; what processes that died left half-written is removed."""
        try:
            paths = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            self.warn(self.folder, error)
            return
        for path in paths:
            if path.name.startswith(WRITING):
                with contextlib.suppress(OSError):
                    if now_s - path.stat().st_mtime > ABANDONED_S:
                        path.unlink()
            elif path.suffix == SUFFIX:
                yield path

    def _check(self, path: Path, data: bytes) -> dict[str, Any]:
        header = decode_header(data)
        if path.name != f"{header['key']}{SUFFIX}":
            raise PageFileError("its name is not its key")
        for name, ours in self.page.facts().items():
            if header[name] != ours:
                raise PageFileError(f"its {name} is {header[name]!r}, not {ours!r}")
        return header

"""Page files: no byte that is not as it was written is ever used."""

import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxkv.cache.tier import OnDisk
from jaxkv.cache.tier_files import (
    ABANDONED_S,
    DIGEST_BYTES,
    HEADER_BYTES,
    MAGIC,
    WRITING,
    PageFileError,
    PageFolder,
    PageFormat,
)
from jaxkv.plan import PageNote

ROOT, KEY, PARENT = b"r" * 32, b"k" * 32, b"p" * 32
NOTE = PageNote(PARENT, 3, 60.0)


def make_format(**changes) -> PageFormat:
    fields = dict(root=ROOT, model="tiny", kv_dtype="float32", shape=(2, 2, 1, 4, 2), bits=np.dtype("<u4"))
    return PageFormat(**(fields | changes))


def make_kv(page: PageFormat, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, page.shape).astype(page.bits)


@pytest.fixture
def folder(tmp_path) -> PageFolder:
    return PageFolder(tmp_path / "cache", make_format())


def test_what_is_written_is_read_and_found_by_others(folder: PageFolder):
    kv = make_kv(folder.page)
    folder.write(KEY, NOTE, kv)
    np.testing.assert_array_equal(folder.read(KEY), kv)
    assert folder.path(KEY).stat().st_size == folder.page.file_bytes == HEADER_BYTES + kv.nbytes + DIGEST_BYTES
    ((key, ttl_s, age_s),) = PageFolder(folder.folder.parent, make_format()).scan()
    assert (key, ttl_s) == (KEY, 60.0) and age_s < 60
    assert folder.folder.stat().st_mode & 0o77 == 0, "others may not read what prompts said"


def test_every_flipped_byte_and_every_truncation_is_seen(folder: PageFolder, caplog):
    folder.write(KEY, NOTE, make_kv(folder.page))
    path = folder.path(KEY)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(PageFileError):
            folder.read(KEY)
        folder.scan()  # by headers; never raises
        path.write_bytes(whole[:at])
        with pytest.raises(PageFileError):
            folder.read(KEY)
        assert folder.scan() == []
    path.write_bytes(whole + b"\0")
    with pytest.raises(PageFileError, match="bytes, not"):
        folder.read(KEY)
    path.write_bytes(whole)
    np.testing.assert_array_equal(folder.read(KEY), make_kv(folder.page))
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1, "one warning"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"root": b"s" * 32}, "its root is"),
        ({"kv_dtype": "bfloat16"}, "its kv_dtype is"),
        ({"shape": (2, 2, 2, 2, 2)}, "its shape is"),
    ],
)
def test_files_of_another_kind_are_not_used(folder: PageFolder, tmp_path, change: dict, reason: str, caplog):
    """Under the right name, whole, and with a right checksum."""
    other = PageFolder(tmp_path / "other", make_format(**change))
    other.write(KEY, NOTE, make_kv(other.page))
    folder.folder.mkdir(parents=True)
    folder.path(KEY).write_bytes(other.path(KEY).read_bytes())
    with pytest.raises(PageFileError, match=reason):
        folder.read(KEY)
    assert folder.scan() == [] and reason in caplog.text


def test_a_file_under_another_pages_name_is_not_used(folder: PageFolder):
    folder.write(KEY, NOTE, make_kv(folder.page))
    os.rename(folder.path(KEY), folder.path(PARENT))
    with pytest.raises(PageFileError, match="its name is not its key"):
        folder.read(PARENT)
    assert folder.scan() == []


def test_an_older_version_is_said_to_be_one(folder: PageFolder):
    folder.write(KEY, NOTE, make_kv(folder.page))
    data = folder.path(KEY).read_bytes()
    folder.path(KEY).write_bytes(MAGIC[:-1] + b"\0" + data[len(MAGIC) :])
    with pytest.raises(PageFileError, match="another version"):
        folder.read(KEY)


def test_half_written_files_are_not_seen_and_go_when_they_are_old(folder: PageFolder):
    folder.write(KEY, NOTE, make_kv(folder.page))
    young, old = folder.folder / ".writing-young", folder.folder / ".writing-old"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - ABANDONED_S - 1,) * 2)
    assert [page.key for page in folder.scan()] == [KEY]
    assert young.exists() and not old.exists()


def test_a_write_that_fails_leaves_nothing(folder: PageFolder, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(KEY, NOTE, make_kv(folder.page))
    assert list(folder.folder.iterdir()) == []


# Writes pages of 4 MB without end, and says so; `limit` is what the kernel lets a file have.
WRITER = """
import pathlib, resource, sys
from tests.host.test_tier_files import NOTE, PageFolder, large_format, large_kv, numbered
folder = PageFolder(pathlib.Path(sys.argv[1]), large_format())
if limit := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for number in range(10**6):
    folder.write(numbered(number % 7), NOTE, large_kv(number % 7))
    print(number, flush=True)
"""


def large_format() -> PageFormat:
    return make_format(shape=(64, 2, 8, 16, 64))


def large_kv(number: int) -> np.ndarray:
    page = large_format()
    return np.full(page.shape, number + 1, page.bits)


def numbered(number: int) -> bytes:
    return bytes([number + 1]) * 32


def start_writer(folder: Path, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_killed_while_it_writes_leaves_whole_pages_only(tmp_path, caplog):
    rng, num_half = random.Random(0), 0
    for _ in range(4):
        writer = start_writer(tmp_path)
        assert writer.stdout is not None and writer.stdout.readline() == "0\n"
        time.sleep(rng.uniform(0.0, 0.1))
        writer.kill()
        writer.communicate()
        folder = PageFolder(tmp_path, large_format())
        found = folder.scan()
        assert found, "the first page was whole"
        for page in found:
            assert np.array_equal(folder.read(page.key), large_kv(page.key[0] - 1))
        half = [path for path in folder.folder.iterdir() if path.name.startswith(WRITING)]
        num_half += len(half)
        for path in half:
            os.utime(path, (1, 1))
        folder.scan()
        assert len(list(folder.folder.iterdir())) == len(found), "what was half written goes"
    assert not caplog.records
    print(f"{num_half} of 4 were in the middle of a page")


def test_a_file_that_the_kernel_refuses_leaves_nothing(tmp_path):
    """As on a full disk, the write itself fails, after a part of it."""
    writer = start_writer(tmp_path, limit=1 << 20)
    _, errors = writer.communicate(timeout=60)
    assert writer.returncode == 1 and "File too large" in errors
    assert list(PageFolder(tmp_path, large_format()).folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_empty_and_one_that_is_a_file_is_said(folder: PageFolder, tmp_path, caplog):
    assert folder.scan() == []
    (tmp_path / "cache").write_text("a file")
    assert folder.scan() == []
    assert "Not a directory" in caplog.text
    with pytest.raises(OSError):  # noqa: PT011 (any will do)
        folder.write(KEY, NOTE, make_kv(folder.page))


def test_reading_counts_as_use(folder: PageFolder):
    folder.write(KEY, NOTE, make_kv(folder.page))
    os.utime(folder.path(KEY), (1, 1))
    assert folder.scan()[0].age_s > 1e6
    folder.read(KEY)
    assert folder.scan()[0] == OnDisk(KEY, 60.0, pytest.approx(0, abs=60))


def test_a_file_that_is_gone_is_no_warning(folder: PageFolder, caplog):
    with pytest.raises(PageFileError, match="is gone"):
        folder.read(KEY)
    folder.unlink(KEY)
    assert not caplog.records


def test_a_long_model_name_fits_the_header(tmp_path):
    folder = PageFolder(tmp_path, make_format(model="/ö" * 100))
    folder.write(KEY, NOTE, make_kv(folder.page))
    np.testing.assert_array_equal(folder.read(KEY), make_kv(folder.page))

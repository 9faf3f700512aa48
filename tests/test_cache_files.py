"""`jaxkv cache ls|rm|verify` on a folder with prefixes that share a beginning."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from jaxkv.cache.tier_files import HEADER_BYTES, PageFolder, PageFormat
from jaxkv.cli.command import main
from jaxkv.plan import PageNote

ROOT = b"r" * 32


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


@pytest.fixture
def folder(tmp_path: Path) -> PageFolder:
    """a - b - c, and a - b - d; alone: e, the second page of a prefix whose first is missing."""
    page = PageFormat(
        root=ROOT, model="models/tiny", kv_dtype="float32", shape=(1, 2, 1, 4, 2), bits=np.dtype("<u4")
    )  # fmt: skip
    made = PageFolder(tmp_path, page)
    for name, parent, index in (("a", None, 0), ("b", "a", 1), ("c", "b", 2), ("d", "b", 2), ("e", "x", 1)):
        note = PageNote(key(parent) if parent else ROOT, index, None)
        made.write(key(name), note, np.full(page.shape, ord(name), page.bits))
    return made


def names(folder: PageFolder) -> str:
    return "".join(sorted(bytes.fromhex(path.stem).decode()[0] for path in folder.folder.glob("*.kv")))


def test_ls_joins_pages_to_prefixes(folder: PageFolder, tmp_path, capsys):
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    rows = {bytes.fromhex(row["key"]).decode()[0]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert sorted(rows) == ["c", "d", "e"]
    assert (rows["c"]["tokens"], rows["c"]["pages"], rows["c"]["whole"]) == (12, 3, True)
    assert rows["c"]["bytes"] == 3 * folder.page.file_bytes and rows["c"]["model"] == "models/tiny"
    assert rows["c"]["age_s"] < 60 and rows["c"]["kv_dtype"] == "float32" and rows["c"]["page_size"] == 4
    assert (rows["e"]["tokens"], rows["e"]["pages"], rows["e"]["whole"]) == (8, 1, False)
    assert main(["cache", "ls", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "3 prefixes, 5 pages" in text and "of no use" in text and key("c").hex()[:16] in text


def test_rm_by_key_takes_what_only_that_prefix_needs(folder: PageFolder, tmp_path, capsys):
    assert main(["cache", "rm", str(tmp_path), "--key", key("c").hex()[:16]]) == 0
    assert names(folder) == "abde"
    assert main(["cache", "rm", str(tmp_path), "--key", key("d").hex()]) == 0
    assert names(folder) == "e" and "removed 3 pages" in capsys.readouterr().out


def test_rm_of_a_beginning_takes_what_follows(folder: PageFolder, tmp_path):
    assert main(["cache", "rm", str(tmp_path), "--key", key("b").hex()]) == 0
    assert names(folder) == "e"


def test_rm_by_age_and_everything(folder: PageFolder, tmp_path):
    old = time.time() - 3 * 3600
    os.utime(folder.path(key("d")), (old, old))
    assert main(["cache", "rm", str(tmp_path), "--age", "4h"]) == 0 and names(folder) == "abcde"
    assert main(["cache", "rm", str(tmp_path), "--age", "2h"]) == 0 and names(folder) == "abce"
    assert main(["cache", "rm", str(tmp_path), "--all"]) == 0 and names(folder) == ""


@pytest.mark.parametrize("at", [0, 7, 40, HEADER_BYTES + 5, -1])
def test_verify_finds_damage_and_rm_removes_it(folder: PageFolder, tmp_path, capsys, at: int):
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert "5 pages are whole, 0 are not" in capsys.readouterr().out
    data = bytearray(folder.path(key("b")).read_bytes())
    data[at] ^= 1
    folder.path(key("b")).write_bytes(data)
    folder.path(key("e")).write_bytes(b"")
    assert main(["cache", "verify", str(tmp_path)]) == 1
    out = capsys.readouterr()
    assert "3 pages are whole, 2 are not" in out.out and key("b").hex() in out.err
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert main(["cache", "rm", str(tmp_path), "--damaged"]) == 0
    assert names(folder) == "acd"
    assert main(["cache", "verify", str(tmp_path)]) == 0


def test_a_renamed_file_is_damaged(folder: PageFolder, tmp_path):
    folder.path(key("a")).rename(folder.path(key("z")))
    assert main(["cache", "verify", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "arguments", [["ls", "nowhere"], ["rm", ".", "--key", "abc"], ["rm", ".", "--key", "ab" * 16], ["rm", "."]]
)
def test_a_wrong_command_is_refused(arguments: list[str], tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["cache", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and capsys.readouterr().err


def test_ls_ends_where_headers_lie(folder: PageFolder, tmp_path, capsys):
    """One that is its own parent, and two that are each other's."""
    for name, parent, index in (("p", "p", 1), ("q", "r", 1), ("r", "q", 2)):
        folder.write(key(name), PageNote(key(parent), index, None), np.zeros(folder.page.shape, folder.page.bits))
    folder.write(key("s"), PageNote(key("p"), 2, None), np.zeros(folder.page.shape, folder.page.bits))
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    rows = {bytes.fromhex(row["key"]).decode()[0]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["s"]["pages"] == 2 and not rows["s"]["whole"]

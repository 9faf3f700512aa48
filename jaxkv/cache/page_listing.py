"""What a cache folder holds, over all models: pages joined to the prefixes that end in them."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from jaxkv.cache.tier_files import DIGEST_BYTES, HEADER_BYTES, SUFFIX, PageFileError, check_digest, decode_header


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFile:
    """A file with a header that can be read."""

    path: Path
    header: dict[str, Any]
    num_bytes: int
    used_s: float  # when it was last used, seconds since the epoch

    @property
    def key(self) -> str:
        return self.header["key"]

    @property
    def page_size(self) -> int:
        """Tokens."""
        return self.header["shape"][3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """A page that no other one follows, with those before it."""

    pages: tuple[PageFile, ...]  # the last one first; a gap ends them

    @property
    def last(self) -> PageFile:
        return self.pages[0]

    @property
    def is_whole(self) -> bool:
        """Else no request can use it: a hit needs every page before it."""
        return len(self.pages) == self.last.header["index"] + 1

    def to_json(self, now_s: float) -> dict[str, Any]:
        last = self.last
        return {
            "key": last.key,
            "tokens": (last.header["index"] + 1) * last.page_size,
            "pages": len(self.pages),
            "whole": self.is_whole,
            "bytes": sum(page.num_bytes for page in self.pages),
            "age_s": max(now_s - max(page.used_s for page in self.pages), 0.0),
            "ttl_s": last.header["ttl_s"],
            "model": last.header["model"],
            "kv_dtype": last.header["kv_dtype"],
            "page_size": last.page_size,
        }


def scan(folder: Path) -> tuple[list[PageFile], list[tuple[Path, str]]]:
    """All page files below `folder`, and those that are no good, with the reason. Contents are not read."""
    good, bad = [], []
    for path in sorted(folder.glob(f"*/*{SUFFIX}")):
        try:
            with open(path, "rb") as file:
                header = decode_header(file.read(HEADER_BYTES))
            status = path.stat()
        except FileNotFoundError:
            continue  # a running engine made room
        except (OSError, PageFileError) as error:
            bad.append((path, str(error)))
            continue
        good.append(PageFile(path=path, header=header, num_bytes=status.st_size, used_s=status.st_mtime))
    return good, bad


def verify(page: PageFile) -> str | None:
    """Reads a whole file; what is wrong with it, if anything."""
    try:
        data = page.path.read_bytes()
        header = decode_header(data)
        if len(data) <= HEADER_BYTES + DIGEST_BYTES:
            return f"it has only {len(data)} bytes"
        check_digest(data)
    except (OSError, PageFileError) as error:
        return str(error)
    if page.path.name != f"{header['key']}{SUFFIX}" or page.path.parent.name != header["root"][:32]:
        return "its name is not its key"
    return None


def prefixes(pages: list[PageFile]) -> list[Prefix]:
    """Every prefix that is not the beginning of a longer one, last used first."""
    by_key = {page.key: page for page in pages}
    parents = {page.header["parent"] for page in pages}
    found = []
    for page in pages:
        if page.key in parents:
            continue
        chain, at = [], page
        while at is not None:
            chain.append(at)
            before = by_key.get(at.header["parent"])
            # A header that nobody checked may say anything; where the index falls there is no circle.
            at = before if before is not None and before.header["index"] == at.header["index"] - 1 else None
        found.append(Prefix(pages=tuple(chain)))
    return sorted(found, key=lambda prefix: (-max(page.used_s for page in prefix.pages), prefix.last.key))


def needed_by(pages: list[PageFile], begins: str) -> list[PageFile]:
    """What goes with the pages whose key begins so: what follows them, and what comes before and leads nowhere else."""
    gone = {page.key for page in pages if page.key.startswith(begins)}
    by_key = {page.key: page for page in pages}
    children: dict[str, list[str]] = {}
    for page in pages:
        children.setdefault(page.header["parent"], []).append(page.key)
    stack = list(gone)
    while stack:
        for child in children.get(stack.pop(), ()):
            if child not in gone:
                gone.add(child)
                stack.append(child)
    stack = list(gone)
    while stack:
        parent = by_key[stack.pop()].header["parent"]
        if parent in by_key and parent not in gone and all(child in gone for child in children[parent]):
            gone.add(parent)
            stack.append(parent)
    return [page for page in pages if page.key in gone]


def older_than(pages: list[PageFile], age_s: float) -> list[PageFile]:
    """Pages not used for so long."""
    now_s = time.time()
    return [page for page in pages if now_s - page.used_s > age_s]

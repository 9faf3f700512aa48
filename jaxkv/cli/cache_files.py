"""`jaxkv cache ls|rm|verify`: the files that engines with a `cache_dir` share."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.cli.options import add_verbose_option
from jaxkv.errors import ConfigError, RequestError
from jaxkv.kv_math import format_bytes

if TYPE_CHECKING:
    from jaxkv.cache.page_listing import PageFile

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the three to `jaxkv cache`."""
    ls = commands.add_parser("ls", help="the prefixes in a cache folder", allow_abbrev=False)
    ls.add_argument("--json", action="store_true", help="print one JSON line a prefix")
    ls.set_defaults(run=run_ls)
    rm = commands.add_parser("rm", help="remove prefixes from it", allow_abbrev=False)
    what = rm.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--key", metavar="KEY", help="of a prefix, as `ls` prints it, or how it begins (8 digits or more)"
    )
    what.add_argument("--age", metavar="AGE", type=_seconds, help="not used for so long: 90s, 30m, 12h, 7d")
    what.add_argument("--damaged", action="store_true", help="files that `verify` finds fault with")
    what.add_argument("--all", action="store_true", help="everything")
    rm.set_defaults(run=run_rm)
    check = commands.add_parser("verify", help="read every file and check it", allow_abbrev=False)
    check.set_defaults(run=run_verify)
    for parser in (ls, rm, check):
        parser.add_argument("folder", metavar="FOLDER", help="the cache_dir of LLM.load")
        add_verbose_option(parser)


def run_ls(args: argparse.Namespace) -> int:
    """Prints a line for each prefix."""
    from jaxkv.cache.page_listing import prefixes, scan  # which needs numpy

    pages, bad = scan(_folder(args.folder))
    now_s = time.time()
    rows = [prefix.to_json(now_s) for prefix in prefixes(pages)]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(f"{'KEY':16} {'TOKENS':>8} {'PAGES':>7} {'SIZE':>11} {'AGE':>6} {'KV':14} MODEL")
    for row in rows:
        gap = "" if row["whole"] else "  (a page before its last ones is missing: of no use)"
        print(
            f"{row['key'][:16]} {row['tokens']:8} {row['pages']:7} {format_bytes(row['bytes']):>11} {_age(row['age_s']):>6} "
            f"{row['kv_dtype']:14} {row['model']}{gap}"
        )
    total = format_bytes(sum(page.num_bytes for page in pages))
    print(f"{len(rows)} prefixes, {len(pages)} pages, {total}" + (f", {len(bad)} damaged files" if bad else ""))
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Removes files.

    Raises:
        RequestError: the key is too short or names nothing.
    """
    from jaxkv.cache.page_listing import older_than, scan, verify  # which needs numpy

    pages, bad = scan(_folder(args.folder))
    if args.damaged:
        gone = [path for path, _ in bad] + [page.path for page in pages if verify(page) is not None]
    elif args.all:
        gone = [path for path, _ in bad] + [page.path for page in pages]
    elif args.age is not None:
        gone = [page.path for page in older_than(pages, args.age)]
    else:
        gone = [page.path for page in _named(pages, args.key)]
    num_bytes = 0
    for path in gone:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            continue  # a running engine was faster
        num_bytes += size
    print(f"removed {len(gone)} pages, {format_bytes(num_bytes)}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Checks every file; the exit status is 1 if one is damaged."""
    from jaxkv.cache.page_listing import scan, verify  # which needs numpy

    pages, bad = scan(_folder(args.folder))
    bad += [(page.path, reason) for page in pages if (reason := verify(page)) is not None]
    for path, reason in bad:
        print(f"{path}: {reason}", file=sys.stderr)
    num_good = len({page.path for page in pages} - {path for path, _ in bad})
    print(f"{num_good} pages are whole, {len(bad)} are not")
    return int(bool(bad))


def _named(pages: "list[PageFile]", key: str) -> "list[PageFile]":
    from jaxkv.cache.page_listing import needed_by  # which needs numpy

    if len(key) < 8:
        raise RequestError(f"--key {key!r} is shorter than 8 digits; `jaxkv cache ls` prints them")
    found = needed_by(pages, key)
    if not found:
        raise RequestError(f"--key {key!r} names no page; `jaxkv cache ls` prints them")
    return found


def _folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the cache_dir of LLM.load")
    return folder


def _seconds(text: str) -> float:
    try:
        return float(text[:-1]) * _UNITS[text[-1:]]
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 90s, 30m, 12h or 7d") from error


def _age(seconds: float) -> str:
    unit = next((name for name in ("d", "h", "m") if seconds >= _UNITS[name]), "s")
    return f"{seconds / _UNITS[unit]:.0f}{unit}"

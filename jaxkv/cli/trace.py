"""`jaxkv trace`: fetches from a running server what its requests and steps did when, as a file for Perfetto."""

import argparse
import json
import math
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from jaxkv.cli.options import add_verbose_option
from jaxkv.errors import ConfigError

_DESCRIPTION = """\
Writes the timelines of /dashboard as a trace: one line for the engine's steps, one for each request.

A server records while somebody looks at its /dashboard, and for --seconds from now on. Open the file at
https://ui.perfetto.dev, which reads it in the browser and uploads nothing, or in chrome://tracing."""

_EXAMPLES = """\
examples:
  jaxkv trace --url http://127.0.0.1:8000 --seconds 10 -o trace.json
"""

_ANSWER_S = 60  # for an answer to begin after the recording


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "trace", help="record a running server for Perfetto", description=_DESCRIPTION, epilog=_EXAMPLES,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--seconds", type=float, default=5, metavar="S",
        help="to record; 0 writes what was recorded for a dashboard so far (default: 5)",
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="where the server asks for one; JAXKV_API_KEY is read, too")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="(default: trace.json)"
    )
    add_verbose_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        ConfigError: an option is impossible, or the server refuses.
        OSError: there is no server at the URL, or the file cannot be written.
    """
    if urllib.parse.urlsplit(args.url).scheme not in ("http", "https"):
        raise ConfigError(f"--url {args.url!r} must begin with http:// or https://")
    if not 0 <= args.seconds < math.inf:
        raise ConfigError(f"--seconds {args.seconds} must be a number >= 0")
    trace = _fetch(args.url, args.seconds, args.api_key or os.environ.get("JAXKV_API_KEY"))
    args.output.write_bytes(trace)
    num = sum(event["ph"] == "X" for event in json.loads(trace)["traceEvents"])
    print(f"{args.output}: {num} spans; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0


def _fetch(url: str, seconds: float, key: str | None) -> bytes:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/trace?seconds={seconds:g}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds + _ANSWER_S) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answers {error.code}: {_message(error.read())}") from error


def _message(body: bytes) -> str:
    """What an answer in OpenAI's error shape says; its beginning, if it is none."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")

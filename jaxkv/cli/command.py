"""Parses the command line, runs one subcommand, and turns errors raised on purpose into one line and an exit status."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import jaxkv
from jaxkv.cli import batch, bench, cache, chat, convert, generate, plan, serve, trace
from jaxkv.errors import JaxkvError

EXIT_FAILED = 1
EXIT_REFUSED = 2  # also argparse's status for a malformed command line
EXIT_INTERRUPTED = 130  # what shells report for a process ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxkv ARGS...`.

    Args:
        argv: arguments without the program's name; None takes them from the command line.

    Returns:
        The exit status: 0, 1 (something failed), 2 (the command or request was refused), 130 (Ctrl-C).
    """
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("jaxkv").setLevel(logging.INFO if args.verbose else logging.WARNING)
    try:
        status = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe is still handled
        return status
    except JaxkvError as error:
        print(f"jaxkv: error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `jaxkv ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again while it exits
        return EXIT_FAILED
    except OSError as error:  # a file that cannot be read or written; names it
        print(f"jaxkv: error: {error}", file=sys.stderr)
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="jaxkv", description="Runs large language models on JAX with a paged KV cache."
    )
    parser.add_argument("--version", action="version", version=f"jaxkv {jaxkv.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (generate, chat, serve, batch, trace, convert, bench, plan, cache):
        module.add_parser(subparsers)
    return parser

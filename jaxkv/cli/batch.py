"""`jaxkv batch`: answers a file of requests in OpenAI's batch format."""

import argparse
import sys
from pathlib import Path

from jaxkv.cli import options
from jaxkv.errors import ConfigError

_DESCRIPTION = """\
Answers each line of a file, {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}, with a line
of the output, in the order in which they end. A line that is refused gets its error, the others go on.

The same command after a kill goes on where it stopped."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "batch", help="answer a file of requests", description=_DESCRIPTION, allow_abbrev=False,
        usage="jaxkv batch INPUT -o OUTPUT -m MODEL [options]", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("input", metavar="INPUT", help="requests, one a line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUTPUT", help="answers; those that are there are kept"
    )
    parser.add_argument(
        "--name", action="append", default=[], metavar="NAME",
        help="what requests call the model; repeatable (default: MODEL)",
    )  # fmt: skip
    parser.add_argument(
        "--lenient",
        action="store_true",
        help="leave out fields that are not served, with a warning, instead of refusing",
    )
    options.add_model_options(parser, engine_seed=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if a line was refused or failed.

    Raises:
        JaxkvError: the model, or the output file, is refused.
        OSError: a file cannot be read or written.
    """
    try:
        from jaxkv.serve.batch import run_batch
        from jaxkv.serve.batch_file import Answers
    except ModuleNotFoundError as error:
        raise ConfigError(f"batches need the package {error.name}; run: pip install 'jaxkv[serve]'") from error
    source = Path(args.input)
    source.open().close()  # a wrong name is told before the model is loaded
    with Answers(Path(args.output)) as answers:
        llm = options.load(args, engine_seed=True)
        done = run_batch(
            llm, source, answers, names=tuple(args.name) or (args.model,), lenient=args.lenient, progress=None
        )
    num_new = done.num_lines - done.num_before
    before = f", {done.num_before} were answered before" if done.num_before else ""
    print(f"jaxkv: {num_new} answered, {done.num_failed} of them with an error{before}", file=sys.stderr)
    return 1 if done.num_failed else 0

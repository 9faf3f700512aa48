"""`jaxkv serve`: an HTTP server with OpenAI's and Anthropic's APIs."""

import argparse
import logging
import os
from pathlib import Path

from jaxkv.cli import options
from jaxkv.errors import ConfigError

_DESCRIPTION = """\
Serves a model over HTTP: OpenAI's /v1/chat/completions and /v1/completions, Anthropic's /v1/messages, tokens, metrics.

SIGTERM and Ctrl-C let running requests end; new ones are refused with 503. A second one ends them at once."""

_EXAMPLES = """\
examples:
  jaxkv serve smollm2 --port 8000
  JAXKV_API_KEY=secret jaxkv serve ./Llama-3.1-8B-Instruct --host 0.0.0.0 --tensor 4 --warm-up
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "serve", help="serve a model over HTTP", description=_DESCRIPTION, epilog=_EXAMPLES, allow_abbrev=False,
        usage="jaxkv serve MODEL [options]", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="a key that requests must bring; repeatable. JAXKV_API_KEY is one more, and not seen in the process list",
    )  # fmt: skip
    group.add_argument(
        "--name", action="append", default=[], metavar="NAME",
        help="what clients call the model; repeatable (default: MODEL, or the last part of its path)",
    )  # fmt: skip
    group.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="sequences that may wait; more get 429 (default: 256)"
    )
    group.add_argument(
        "--max-body-mb", type=float, default=16, metavar="MB", help="largest body of a request (default: 16)"
    )
    group.add_argument("--timeout", type=float, metavar="S", help="most seconds a request may take (default: no limit)")
    group.add_argument(
        "--drain-timeout", type=float, default=60, metavar="S",
        help="seconds that running requests get to end after SIGTERM (default: 60)",
    )  # fmt: skip
    group.add_argument(
        "--lenient",
        action="store_true",
        help="leave out fields that are not served, with a warning, instead of refusing",
    )
    group.add_argument("--log-prompts", action="store_true", help="write the text of prompts to the log (implies -v)")
    options.add_model_options(parser, engine_seed=True, is_positional=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        JaxkvError: the model, or an option, is refused.
        OSError: the address cannot be listened at.
    """
    try:
        from jaxkv.serve.limits import ServeConfig
        from jaxkv.serve.server import bind, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs the package {error.name}; run: pip install 'jaxkv[serve]'") from error
    _check(args)
    if args.log_prompts:
        logging.getLogger("jaxkv").setLevel(logging.INFO)
    keys = [*args.api_key, *filter(None, [os.environ.get("JAXKV_API_KEY")])]
    config = ServeConfig(
        names=tuple(args.name) or (_name(args.model),),
        api_keys=tuple(keys),
        max_queue=args.max_queue,
        max_body_bytes=int(args.max_body_mb * 2**20),
        timeout_s=args.timeout,
        drain_s=args.drain_timeout,
        lenient=args.lenient,
        log_prompts=args.log_prompts,
    )
    with bind(args.host, args.port) as listener:
        serve(options.load(args, engine_seed=True), config, listener)
    return 0


def _name(model: str) -> str:
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port {args.port} must be in [0, 65535]")
    if args.max_queue < 0:
        raise ConfigError(f"--max-queue {args.max_queue} must be >= 0")
    for flag, value in (("--max-body-mb", args.max_body_mb), ("--timeout", args.timeout)):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{flag} {value} must be a number > 0")
    if not 0 <= args.drain_timeout < 1e9:
        raise ConfigError(f"--drain-timeout {args.drain_timeout} must be a number >= 0")
    if any(not key for key in args.api_key):
        raise ConfigError("--api-key is empty; give a key, or leave the flag out")

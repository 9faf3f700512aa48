"""`jaxkv cache`: what the prefix cache does. `explain` says why one prompt cannot reuse another; `ls`, `rm` and `verify` look
after what `cache_dir` holds."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.cli import cache_files
from jaxkv.cli.options import add_verbose_option
from jaxkv.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from jaxkv.tokenizer import Tokenizer

_DESCRIPTION = """\
Compares two requests and says how much of B the cached pages of A would save, and why not more: the first token that
differs, the message and character it comes from, and what to do about it. Needs the model's tokenizer and chat template;
no weights are loaded and nothing is run.

A and B are JSON files ("-" is standard input): a chat {"messages": [...], "tools": [...]} or a {"prompt": ...} as OpenAI's
API takes them, with cache_salt, adapter, prompt_logprobs, chat_template, chat_template_kwargs and rendered_at if need be.

Exit status: 0 if one prompt is the beginning of the other (or they are equal), 1 if tokens, salt, model or adapter differ,
2 if a file or the command is no good."""

_EXAMPLES = """\
examples:
  jaxkv cache explain before.json after.json -m smollm2
  jaxkv cache explain before.json after.json -m ./my-model --page-size 32 --json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "cache", help="why a prompt missed the prefix cache; its files", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    explain = commands.add_parser(
        "explain", help="compare two requests", description=_DESCRIPTION, epilog=_EXAMPLES, allow_abbrev=False,
        usage="jaxkv cache explain A.json B.json -m MODEL [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    explain.add_argument("a", metavar="A.json", help="the request that ran before")
    explain.add_argument("b", metavar="B.json", help="the request that missed")
    explain.add_argument(
        "-m", "--model", required=True, metavar="MODEL",
        help="as `jaxkv generate` takes it, or a folder that holds only a tokenizer",
    )  # fmt: skip
    explain.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page (default: 16)")
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_verbose_option(explain)
    explain.set_defaults(run=run_explain)
    cache_files.add_commands(commands)


def run_explain(args: argparse.Namespace) -> int:
    """Prints the explanation; the exit status is 1 if the prompts or their keys differ.

    Raises:
        JaxkvError: the model has no tokenizer, or a request cannot be read or laid out.
    """
    from jaxkv.explain import explain, parse_ask, to_text

    if args.a == "-" and args.b == "-":
        raise RequestError("both requests come from standard input; name a file for one of them")
    asks = [parse_ask(_read(path), path) for path in (args.a, args.b)]  # before the model: a bad file is told at once
    found = explain(*asks, tokenizer=_tokenizer(args.model), page_size=args.page_size)
    print(json.dumps(found.to_json(), ensure_ascii=False) if args.json else to_text(found))
    return int(found.differs)


def _read(path: str) -> Any:
    try:
        with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as file:
            return json.loads(file.read())
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(f"{path} is nested too deeply") from error


def _tokenizer(model: str) -> "Tokenizer":
    from jaxkv.tokenizer import load_tokenizer

    folder = Path(model).expanduser()
    names = ("tokenizer.json", "tokenizer.model")
    if any((folder / name).exists() for name in names) and not (folder / "config.json").exists():
        return load_tokenizer(folder)
    from jaxkv.catalog import open_model  # brings jax

    source = open_model(model)
    if source.tokenizer_source is None:
        raise CheckpointError(f"{source.location} has no tokenizer; name a model that has one")
    return load_tokenizer(source.tokenizer_source, generation_config=source.generation_config)

"""`jaxkv generate`: completes prompts from arguments, a file or standard input."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.cli import options
from jaxkv.cli.stats import print_stats
from jaxkv.errors import RequestError
from jaxkv.request import FinishReason, RequestOutput

if TYPE_CHECKING:
    from jaxkv.api import LLM

Prompt = str | list[int]

_DESCRIPTION = """\
Generates text for one or many prompts, batched continuously.

With a chat model each prompt is sent as a user's message, through the model's own chat template; --raw continues the
text as it is. Without a prompt, standard input is read to its end as one prompt."""

_EXAMPLES = """\
examples:
  jaxkv generate -m smollm2 "Why is the sky blue?" --max-tokens 64 --temperature 0
  jaxkv generate -m smollm2 --raw "Once upon a time" --n 3 --seed 1 --json
  jaxkv generate -m smollm2 --prompt-file prompts.jsonl --json > answers.jsonl
  cat letter.txt | jaxkv generate -m smollm2 --system "Summarise the letter."
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "generate", help="complete prompts", description=_DESCRIPTION, epilog=_EXAMPLES, allow_abbrev=False,
        usage="jaxkv generate -m MODEL [options] [PROMPT ...]", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete")
    parser.add_argument(
        "--prompt-file", metavar="FILE",
        help='one prompt a line ("-" is standard input); in a .jsonl file a line is a JSON string, a list of token '
        'ids, or an object with one of these under "prompt"',
    )  # fmt: skip
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--chat", action="store_true", help="use the chat template, or fail if the model has none")
    layout.add_argument("--raw", action="store_true", help="use no chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message put before each prompt; implies --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON line for each prompt")
    parser.add_argument("--stats", action="store_true", help="print speed and memory figures to stderr at the end")
    options.add_sampling_options(parser, defaults={"max_tokens": 256})
    options.add_cache_options(parser)
    options.add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if a completion ended with an error.

    Raises:
        JaxkvError: the model or a prompt is refused.
        OSError: the prompt file cannot be read.
    """
    caching = options.cache_arguments(args)
    params = options.sampling_params(args)  # before the model is loaded: a wrong flag is told at once
    if args.raw and args.system is not None:
        raise RequestError("--system needs the chat template, --raw forbids it; leave one of them out")
    prompts = list(_read_prompts(args))
    if not prompts:
        raise RequestError(f"{args.prompt_file} holds no prompt; it needs one a line")
    llm = options.load(args)
    templated = _uses_template(llm, args)
    start_s = time.perf_counter()
    laid_out = [_lay_out(llm, prompt, args.system) if templated else prompt for prompt in prompts]
    outputs = llm.generate(laid_out, params, **caching)
    elapsed_s = time.perf_counter() - start_s
    for prompt, output in zip(prompts, outputs, strict=True):
        if args.json:
            print(json.dumps(to_json(prompt, output), ensure_ascii=False))
        else:
            _print_text(prompt, output, with_prompt=len(prompts) > 1)
    if args.stats:
        print_stats(llm.stats(), outputs, elapsed_s)
    return _report_errors(outputs)


def _read_prompts(args: argparse.Namespace) -> Iterator[Prompt]:
    yield from args.prompts
    if args.prompt_file is not None:
        yield from _read_file(args.prompt_file)
    elif not args.prompts:
        if sys.stdin.isatty():
            raise RequestError('no prompt: give one, as in `jaxkv generate -m smollm2 "Hello"`, or --prompt-file FILE')
        yield sys.stdin.read()


def _read_file(path: str) -> Iterator[Prompt]:
    try:
        with contextlib.nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if text := line.rstrip("\r\n"):
                    yield _parse_line(text, f"{path}:{number}") if path.endswith(".jsonl") else text
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse_line(text: str, where: str) -> Prompt:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
        return prompt
    raise RequestError(f'{where} must be a string, a list of token ids, or an object with one of these as "prompt"')


def _uses_template(llm: "LLM", args: argparse.Namespace) -> bool:
    has_template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    return args.chat or args.system is not None or (has_template and not args.raw)


def _lay_out(llm: "LLM", prompt: Prompt, system: str | None) -> list[int]:
    if not isinstance(prompt, str):
        return prompt  # token ids are a finished prompt
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat_prompt(messages)


def to_json(prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """All of an output, ready for JSON; `prompt` is what the user wrote, `prompt_token_ids` what the model saw."""
    return {**dataclasses.asdict(output), "prompt": prompt}


def _print_text(prompt: Prompt, output: RequestOutput, *, with_prompt: bool) -> None:
    """The text alone where there is one; a heading above each where there are several."""
    if with_prompt:
        print(f"=== {prompt}")
    for completion in output.outputs:
        if len(output.outputs) > 1:
            print(f"--- {completion.index + 1} of {len(output.outputs)}")
        print(completion.text)


def _report_errors(outputs: Sequence[RequestOutput]) -> int:
    failed = [one for output in outputs for one in output.outputs if one.finish_reason is FinishReason.ERROR]
    for completion in failed:
        print(f"jaxkv: error: a completion failed: {completion.error}", file=sys.stderr)
    return 1 if failed else 0

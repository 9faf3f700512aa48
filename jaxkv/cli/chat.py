"""`jaxkv chat`: a conversation in the terminal, streamed."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from jaxkv.cli import options
from jaxkv.errors import EngineError, RequestError
from jaxkv.request import SamplingParams

if TYPE_CHECKING:
    from jaxkv.api import LLM

_DESCRIPTION = """\
Chats in the terminal. Needs a model with a chat template.

  /reset   forget the conversation
  /exit    leave (Ctrl-D too)
  Ctrl-C   stop the answer, keep the conversation"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "chat", help="talk to a chat model", description=_DESCRIPTION, allow_abbrev=False,
        usage="jaxkv chat -m MODEL [options]", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="system message at the head of the conversation")
    options.add_sampling_options(
        parser, skip=("n", "logprobs", "prompt_logprobs", "prompt_logprobs_from"), defaults={"max_tokens": 1024}
    )
    options.add_cache_options(parser, skip=("cache_breakpoints",))  # they would be the same in every turn
    options.add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads messages until /exit or the end of the input.

    Raises:
        JaxkvError: the model is refused, or has no chat template.
    """
    params, caching = options.sampling_params(args), options.cache_arguments(args)
    llm = options.load(args)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use `jaxkv generate`")
    with contextlib.suppress(ImportError):  # not everywhere; where it is, input() has a history and line editing
        import readline  # noqa: F401
    Conversation(llm, params, args.system, caching).run()
    return 0


class Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None, caching: Mapping[str, Any]) -> None:
        self._llm = llm
        self._params = params
        self._caching = caching  # arguments of `LLM.stream`
        self._head = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._head)

    def run(self) -> None:
        """Reads from stdin, answers on stdout."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print("/reset forgets, /exit leaves, Ctrl-C stops an answer", file=sys.stderr)
        while True:
            try:
                text = input("> " if is_terminal else "").strip()
            except EOFError:
                print(end="\n" if is_terminal else "")
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
                continue
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._head)
            elif text.startswith("/"):
                print(f"unknown command {text.split()[0]}; /reset and /exit are known", file=sys.stderr)
            elif text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """Streams one answer. What was written before Ctrl-C stays in the conversation."""
        question = {"role": "user", "content": text}
        try:
            pieces = self._llm.stream(self._llm.chat_prompt([*self.messages, question]), self._params, **self._caching)
        except RequestError as error:  # usually too long by now
            print(f"{error}\n(/reset starts over)", file=sys.stderr)
            return
        shown: list[str] = []
        with _interrupt_flag() as interrupted, contextlib.closing(pieces):
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
                    shown.append(piece)
                    if interrupted:
                        break
            except EngineError as error:  # this answer is lost; the engine goes on
                print(f"\n{error}", file=sys.stderr)
                return
        print(" [stopped]" if interrupted else "")
        self.messages += [question, {"role": "assistant", "content": "".join(shown)}]


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[list[int]]:
    """Collects the first Ctrl-C in a list instead of raising in the middle of a step; a second one raises."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)

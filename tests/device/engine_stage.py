"""The real scheduler, runner and engine together, and what each request must give whatever happens around it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxkv.config import SchedulerConfig
from jaxkv.device.runner import Runner
from jaxkv.engine import Engine
from jaxkv.grammar.compiler import GrammarCompiler
from jaxkv.grammar.room import GrammarRoom
from jaxkv.grammar.vocabulary import TokenVocabulary, make_vocabulary
from jaxkv.intake import Intake
from jaxkv.outputs import OutputBuilder
from jaxkv.request import Completion, RequestOutput, SamplingParams
from jaxkv.schedule.scheduler import Scheduler
from jaxkv.tokenizer.base import SpecialTokens, Tokenizer
from tests.device.dense import Dense
from tests.device.sampling import Row
from tests.device.stage import MAX_LEN, MAX_STEPS, PAGE, TILE, V, poison

EOS = (2,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A request before it has an id."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*(() if self.params.ignore_eos else EOS), *self.params.stop_token_ids}))

    def row(self, child: int = 0, bad_words_ids: tuple[tuple[int, ...], ...] = ()) -> Row:
        return Row(
            params=self.params, prompt=self.prompt, stop_ids=self.stop_ids, bad_words_ids=bad_words_ids,
            seed=(self.params.seed or 0) % 2**64, child=child,
        )  # fmt: skip


def ask(prompt: tuple[int, ...], **params: Any) -> Ask:
    return Ask(prompt=prompt, params=SamplingParams(**(dict(max_tokens=20, temperature=0, seed=0) | params)))


class Client:
    """An engine on an emptied runner (its pool full of NaN), driven by hand.

    Args:
        runner: shared; nothing of an earlier client is left in it.
        tokenizer: None leaves texts empty.
        overlap: of the engine.
        vocabulary: what grammars see of the tokenizer.
        config: changes to the scheduler's numbers.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        *,
        overlap: bool = True,
        vocabulary: Callable[[bool], TokenVocabulary] | None = None,
        **config: Any,
    ) -> None:
        poison(runner)
        numbers = dict(
            max_len=MAX_LEN, max_rows=runner.shards.num_rows, page_size=PAGE, num_pages=61, token_budget=MAX_LEN,
            chunk_align=TILE, decode_steps=MAX_STEPS, reserve_steps=0, num_shards=runner.shards.num,
            windows=runner.pool_spec.groups.windows if runner.pool_spec.groups else (None,),
        )  # fmt: skip
        scheduler = Scheduler(SchedulerConfig(**(numbers | config)))
        fits = GrammarRoom(scheduler.config.grammars, scheduler.config.max_rows).fits
        self.grammars = GrammarCompiler(vocabulary or grammar_vocabulary, fits)
        self.engine = Engine(scheduler, runner, tokenizer, overlap=overlap, grammars=self.grammars)
        self._intake = Intake(vocab_size=V, eos_ids=EOS, tokenizer=tokenizer)
        self._number = 0

    def submit(
        self,
        what: Ask,
        *,
        stream: bool = False,
        name: str = "",
        deadline_s: float | None = None,
        refuse: bool = False,
    ) -> OutputBuilder:
        """`refuse`: raise for what is wrong with a grammar, instead of ending the request."""
        self._number += 1
        if refuse:
            self.engine.await_grammar(len(what.prompt), what.params)
        request = self._intake.make_request(
            name or f"r{self._number}", what.prompt, what.params, seed=1000 + self._number, deadline_s=deadline_s
        )
        return self.engine.add(request, None, stream=stream)

    def run(self, *builders: OutputBuilder, max_steps: int = 2000) -> list[RequestOutput]:
        """Steps until all of these are complete."""
        for _ in range(max_steps):
            if all(builder.output is not None for builder in builders):
                return [builder.output for builder in builders if builder.output is not None]
            self.engine.step()
        raise AssertionError("never ends")

    def generate(self, *asks: Ask) -> list[RequestOutput]:
        return self.run(*[self.submit(what) for what in asks])

    def check_idle(self) -> None:
        """Every page came back (behaviour 6), and nothing is in flight."""
        self.engine.step()  # takes in what was dispatched before the last request ended
        stats, config = self.engine.stats(), self.engine.scheduler.config
        assert not self.engine.has_unfinished
        assert (stats.num_requests, stats.num_waiting, stats.num_running, stats.num_in_flight) == (0, 0, 0, 0)
        assert (
            stats.pages_used == 0
            and stats.pages_free + stats.pages_cached == (config.num_pages - 1) * config.num_shards
        )
        self.engine.scheduler.check()


def check_tokens(output: RequestOutput, what: Ask, dense: Dense) -> None:
    """Each completion is what the dense model makes of the request alone."""
    assert len(output.outputs) == what.params.n
    for child, completion in enumerate(output.outputs):
        assert completion.index == child and completion.error is None
        assert completion.token_ids == dense.generate(what.row(child)), (what, child)


def only(output: RequestOutput) -> Completion:
    (completion,) = output.outputs
    return completion


# --- a tokenizer for the tiny vocabulary -----------------------------------------------------------------------------

PIECES = [bytes([n + 30]) for n in range(V)]  # id 3 is "!" and so on
PIECES[1:3] = b" ", b"<eos>"
PIECES[80:98:2] = (
    "aé€😀".encode()[1:4],
    b"\xe2\x82",
    b"\xac",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xc3",
    b"\xa9",
    b"ab",
    b" the",
)


class Bytes:
    """Every id stands for a few bytes, some of them parts of characters."""

    size = V
    special_ids = frozenset(EOS)
    added_ids = frozenset(EOS)
    utf8_errors = "replace"
    trims_all_spaces = False

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(bytes([byte])) for byte in text.encode()]

    def token_id(self, text: str) -> int | None:
        return PIECES.index(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    first_token_bytes = token_bytes

    def save(self, folder: Any) -> dict[str, Any]:
        raise NotImplementedError


def grammar_vocabulary(for_tools: bool) -> TokenVocabulary:
    """The same tokens as grammars see them; none that begins a tool call is special."""
    return make_vocabulary(PIECES, size=V, excluded=EOS, end_ids=EOS)


def canonical_vocabulary(for_tools: bool) -> TokenVocabulary:
    """With the tokenizer's own spelling, so that text may be forced; text that it has no tokens for is spelled by none."""

    def encode(text: str) -> list[int]:
        return Bytes().encode(text) if all(bytes([byte]) in PIECES for byte in text.encode()) else []

    return dataclasses.replace(grammar_vocabulary(for_tools), encode=encode)


def make_tokenizer(vocabulary: Any = None) -> Tokenizer:
    return Tokenizer(vocabulary or Bytes(), SpecialTokens(texts={"eos_token": "<eos>"}, eos_ids=frozenset(EOS)))

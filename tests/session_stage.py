"""An `LLM` on a device made of plain Python: what sessions say must be what each prompt alone would have given."""

import dataclasses
from typing import Any

from jaxkv.api import LLM
from jaxkv.config import SchedulerConfig
from jaxkv.device.settings import EngineConfig
from jaxkv.engine import Engine
from jaxkv.intake import Intake
from jaxkv.plan import StepPlan, StepResult
from jaxkv.request import RequestOutput, SamplingParams
from jaxkv.schedule.scheduler import Scheduler
from tests.fake_model import VOCAB, generate_alone, make_request, small_config
from tests.fake_runner import FakeRunner

PAGE = 4  # tokens
EOS = 49


@dataclasses.dataclass
class _Flight:
    computed: StepResult

    def result(self) -> StepResult:
        return self.computed


class FakeDevice:
    """`FakeRunner` with the face that the engine sees."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._runner = FakeRunner(config)

    def reset(self) -> None:
        next_step = self._runner._next_step
        self._runner = FakeRunner(self._config)
        self._runner._next_step = next_step

    def dispatch(self, plan: StepPlan) -> _Flight:
        return _Flight(self._runner.run(plan))


def fake_llm(*, overlap: bool = True, **changes: Any) -> LLM:
    """Four rows, 40 pages of four tokens, up to 64 tokens a sequence; `changes` to `SchedulerConfig`."""
    config = small_config(**changes)
    engine = Engine(Scheduler(config), FakeDevice(config), None, overlap=overlap)  # type: ignore[arg-type]
    return LLM("fake", engine, Intake(vocab_size=VOCAB, eos_ids=(EOS,)), EngineConfig())


def params(max_tokens: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, **more)


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def check_alone(output: RequestOutput, asked: SamplingParams, max_len: int = 64) -> None:
    """The tokens are those of the prompt alone, with no cache, batch or session."""
    fields = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    request = make_request("alone", output.prompt_token_ids, eos=(EOS,), **fields)
    wanted = generate_alone(request, 0, max_len)
    got = output.outputs[0]
    assert list(got.token_ids) == wanted.token_ids[: len(got.token_ids)]
    assert len(got.token_ids) == len(wanted.token_ids) or got.finish_reason in ("abort", "error"), got


def check_idle(llm: LLM, num_held: int = 0) -> None:
    """Nobody runs: no page is in use, the books agree, and sessions hold what is said."""
    llm._engine.scheduler.check()
    stats = llm._engine.stats()
    assert stats.num_requests == stats.pages_used == 0 and stats.pages_held == num_held, stats
    assert stats.pages_free + stats.pages_cached == llm.num_pages

"""Whole engines against transformers: tokens and log-probabilities of every variant, and all schedules of each family."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.checkpoint.hf import HfSource
from jaxkv.checkpoint.load import load_model, model_config
from jaxkv.device.batch import Buckets
from jaxkv.device.runner import InFlight, Runner
from jaxkv.models.groups import group_layers
from jaxkv.paging import Paging
from jaxkv.plan import StepPlan
from jaxkv.request import RequestOutput
from jaxkv.sharding import make_mesh
from tests.device.engine_stage import Client, ask
from tests.device.stage import MAX_LEN, PAGE, TILE, make_runner
from tests.models.families import FIRST, VARIANTS, WINDOW, build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TILES, TOP = 4, 20
NUM_NEW = 64
PROMPT_LENS = (32, 5, 17, 29)
# Every engine compiles for about 12 s of CPU time. These are the quick part: a window beside none, norms over all heads.
QUICK = ("llama-gqa-tied", "gemma3", "olmoe")
# On devices: parameters that are split or copied in ways of their own (one KV head, norms over all heads, experts).
QUICK_ON_DEVICES = (("gemma3", 2), ("mixtral", 2), ("olmo2", 2), ("llama-gqa-tied", 4))
# The second set of frequencies is for sequences of more than 40 tokens here.
LONG = {"phi3-longrope-long": ((45,), 50)}
BUCKETS = Buckets(
    decode_rows=(4,), mixed_rows=(4,), mixed_tiles=(TILES,), setups=(4,), page_writes=(16,), page_copies=(2,),
    count_tokens=(MAX_LEN,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt and what transformers makes of it."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: np.ndarray  # [new tokens, V]


def cases(model: Any, name: str) -> list[Case]:
    """Greedy decoding with a cache, token by token; the prompt in one pass unless its frequencies depend on its length."""
    rng, out = np.random.default_rng(3), []
    lens, num_new = LONG.get(name, (PROMPT_LENS, NUM_NEW))
    for length in lens:
        prompt = rng.integers(3, 96, length).tolist()
        tokens: list[int] = []
        logprobs, cache = [], None
        pending = [[token] for token in prompt] if name == "llama-rope-dynamic" else [prompt]
        with torch.no_grad():
            while len(tokens) < num_new:
                step = model(torch.tensor([pending.pop(0)]), past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                if pending:
                    continue
                logprobs.append(torch.log_softmax(step.logits[0, -1], dim=-1).numpy())
                tokens.append(int(logprobs[-1].argmax()))
                pending.append(tokens[-1:])
        out.append(Case(tuple(prompt), tokens, np.stack(logprobs)))
    return out


def runner_of(
    folder: Path, *, tensor: int = 1, per_layer: bool = True, dtype: Any = np.float32, grouped: bool = False
) -> Runner:
    source = HfSource(folder)
    family, cfg = model_config(source)
    model: Any = load_model(
        source, family, cfg.for_len(MAX_LEN), dtype=np.dtype(dtype), mesh=make_mesh(1), per_layer=per_layer,
    )  # fmt: skip
    groups = group_layers(cfg.windows, MAX_LEN) if grouped else None
    num_pages = 64 * (groups.num if groups else 1)
    return make_runner(model, tensor=tensor, buckets=BUCKETS, num_pages=num_pages, groups=groups)


def check(client: Client, wanted: list[Case]) -> list[RequestOutput]:
    asks = [ask(case.prompt, max_tokens=len(case.tokens), ignore_eos=True, logprobs=TOP) for case in wanted]
    outs = client.generate(*asks)
    for out, case in zip(outs, wanted, strict=True):
        (completion,) = out.outputs
        assert list(completion.token_ids) == case.tokens
        assert completion.logprobs is not None
        for found, expected in zip(completion.logprobs, case.logprobs, strict=True):
            ids, values = zip(*found.top, strict=True)
            np.testing.assert_allclose(values, expected[list(ids)], atol=1e-4, rtol=0)
    client.check_idle()
    return outs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FIRST.values()]
)
def test_schedules_change_nothing(name: str, tmp_path: Path) -> None:
    """Plenty of pages; a pool for two rows and chunks of one tile, which preempts; both again with a warm cache."""
    model = build(name)
    model.save_pretrained(tmp_path)
    wanted = cases(model, name)
    runner = runner_of(tmp_path)
    for settings in ({"token_budget": TILES * TILE}, {"num_pages": 21, "token_budget": TILE + 3}):
        client = Client(runner, **settings)
        check(client, wanted)
        preempted = client.engine.scheduler.stats().num_preemptions
        assert (preempted > 0) == ("num_pages" in settings)
        warm = check(client, wanted)
        assert warm[0].cached_tokens > 0 or preempted  # a tight pool has lost it again


WINDOWED = ("mistral", "gemma2", "gemma3")


def poison_what_left(client: Client, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every step, NaN in the null page and in all pages whose content is worth nothing."""
    (memory,), dispatch = client.engine.scheduler._roster.memories, runner.dispatch
    spec = runner.pool_spec

    def poisoned(plan: StepPlan) -> InFlight:
        is_free = np.zeros((spec.num_layers, spec.num_pages), bool)
        is_free[:, [0, *memory._allocator._free]] = True
        pool = runner._pool
        assert pool is not None
        runner._pool = jnp.where(is_free.reshape(-1, 1, 1, 1, 1), jnp.asarray(np.nan, pool.dtype), pool)
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", poisoned)


@pytest.mark.parametrize("name", ["qwen2-windows", *(pytest.param(name, marks=pytest.mark.slow) for name in WINDOWED)])
def test_pages_that_left_windows_do_not_matter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in groups: all schedules, with NaN in what was given back."""
    model = build(name)
    model.save_pretrained(tmp_path)
    wanted = cases(model, name)
    runner = runner_of(tmp_path, grouped=True)
    groups = runner.pool_spec.groups
    assert groups is not None and WINDOW in groups.windows
    least = Paging(page_size=PAGE, windows=groups.windows, token_budget=TILE + 3).num_needed(MAX_LEN)
    plenty, tight = 61 * groups.num, least + 5
    for num_pages, token_budget in ((plenty, TILES * TILE), (tight, TILE + 3)):
        with monkeypatch.context() as patch:
            client = Client(runner, num_pages=num_pages, token_budget=token_budget)
            poison_what_left(client, runner, patch)
            check(client, wanted)
            stats = client.engine.scheduler.stats()
            assert stats.num_left_windows > 0
            assert (stats.num_preemptions > 0) == (num_pages == tight)
            warm = check(client, wanted)
            assert warm[0].cached_tokens > 0 or stats.num_preemptions
            several = client.generate(*(ask(c.prompt, max_tokens=len(c.tokens), ignore_eos=True, n=2) for c in wanted))
            assert all(
                list(o.token_ids) == c.tokens for out, c in zip(several, wanted, strict=True) for o in out.outputs
            )
            client.check_idle()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "per_layer"),  # the first of each family went through `test_schedules_change_nothing`
    [(name, i % 2 == 0) for i, name in enumerate(VARIANTS) if name not in FIRST.values()],
)
def test_tokens_and_logprobs_of_decode(name: str, per_layer: bool, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    client = Client(runner_of(tmp_path, per_layer=per_layer), token_budget=TILES * TILE)
    check(client, cases(model, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        pytest.param(name, tensor, marks=() if (name, tensor) in QUICK_ON_DEVICES else pytest.mark.exhaustive)
        for name in FIRST.values()
        for tensor in (2, 4)
    ],
)
def test_devices_change_nothing(name: str, tensor: int, tmp_path: Path) -> None:
    """Heads, ffn units and experts over two and four devices; K/V heads are copied where there are fewer."""
    model = build(name)
    model.save_pretrained(tmp_path)
    runner = runner_of(tmp_path, tensor=tensor, per_layer=tensor == 4)
    check(Client(runner, token_budget=TILES * TILE), cases(model, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_bfloat16_scores_stay_close_to_float32(name: str, tmp_path: Path) -> None:
    """Log-probabilities of a prompt, weights, activations and pages in bfloat16; no further off than transformers is."""
    model = build(name)
    model.save_pretrained(tmp_path)
    prompt = np.random.default_rng(3).integers(3, 96, 60).tolist()
    exact = scores(model, prompt)
    limit = 2 * np.abs(scores(model.to(torch.bfloat16), prompt) - exact).mean()
    client = Client(runner_of(tmp_path, dtype=jnp.bfloat16), token_budget=TILES * TILE)
    (out,) = client.generate(ask(tuple(prompt), max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0))
    assert out.prompt_logprobs is not None
    found = np.array([each.logprob for each in out.prompt_logprobs if each is not None])
    assert found.shape == exact.shape
    assert 0 < np.abs(found - exact).mean() < limit
    assert all(np.isfinite(each.logprob) for each in out.outputs[0].logprobs or ())


def scores(model: Any, prompt: list[int]) -> np.ndarray:
    """float32 [T - 1]: log-probabilities of the prompt's own tokens."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), dim=-1)
    return table[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].numpy()

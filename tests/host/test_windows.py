"""Layers that see a window only: what they keep, what they give back, and what of it can be reused.

The fake device reads through each group's page table, from pages that are overwritten as soon as nobody needs them.
"""

import numpy as np
import pytest

from jaxkv.config import SchedulerConfig, TierConfig
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.paging import Paging
from jaxkv.schedule.group_cache import of_group
from jaxkv.schedule.scheduler import Scheduler
from jaxkv.schedule.sequence import Sequence
from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import CheapRunner, Loop, run

GEMMA_3 = (None, *[512] * 5)  # Gemma 3 270M: 3 layers of 18 see everything


def hold_8k(windows: tuple[int | None, ...], token_budget: int) -> tuple[int, int]:
    """Pages that one sequence of 8k tokens has while it decodes, and the most that it had at once."""
    config = SchedulerConfig(
        max_len=8300, max_rows=1, page_size=16, num_pages=520 * len(windows), token_budget=token_budget, decode_steps=8,
        windows=windows,
    )  # fmt: skip
    scheduler, runner, most = Scheduler(config), CheapRunner(1, 8), 0
    scheduler.add(make_request("a", [7] * 8100, max_tokens=190))
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        assert plan is not None
        used = scheduler.stats().pages_used
        most = max(most, used)
        scheduler.commit(runner.run(plan))
        if scheduler.has_unfinished and not plan.chunks:
            num_decoding = used
    return num_decoding, most


@pytest.mark.parametrize("token_budget", [512, 1024])
def test_8k_tokens_of_gemma_3_take_a_quarter(token_budget: int) -> None:
    everything, _ = hold_8k((None,) * 6, 512)
    assert everything == 6 * 518
    decoding, most = hold_8k(GEMMA_3, token_budget)
    assert decoding <= everything * 0.23
    assert most <= everything / 4, "also while the prompt is computed: half a window more in each group"
    assert most <= Paging(page_size=16, windows=GEMMA_3, token_budget=token_budget).num_needed(8290)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
def test_a_running_sequence_gives_back_what_it_does_not_see(window: int) -> None:
    loop = Loop(small_config(windows=(None, window), num_pages=81))
    loop.add(make_request("a", make_prompt(40), max_tokens=20, min_tokens=20))
    while not loop.scheduler._roster.rows.decoding.any():
        loop.step()
    for _ in range(4):
        loop.step()
    (seq,) = loop.scheduler._roster.all_sequences()
    whole, seen = (len([page for page in pages if page]) for pages in seq.tables)
    assert whole >= 10 and seen <= window // 4 + 4
    stats = loop.scheduler.stats()
    assert (stats.pages_in_windows, stats.pages_used) == (seen, whole + seen)
    assert stats.num_left_windows == len(seq.tables[1]) - seen > 0
    assert 0 < stats.utilisation <= 1 and stats.tokens_held <= stats.pages_used * 4
    loop.drain()
    loop.check_against_alone()


def test_a_prefix_is_reused_as_far_as_every_group_has_what_is_seen() -> None:
    prompt = make_prompt(33)
    loop = run(Loop(small_config(windows=(None, 6), num_pages=81)), make_request("a", prompt, max_tokens=1))
    memory = loop.scheduler._roster.memories[0]
    cache, keys = memory._cache, memory.page_keys(np.array(prompt, np.int32), "")
    assert cache is not None and len(keys) == 8

    def num_reused(of: str) -> int:
        run(loop, make_request(of, prompt, max_tokens=4))
        return loop.finished[of, 0].cached_tokens or 0

    assert num_reused("all") == 32
    # A token at 32 sees keys from 27 on, in pages 6 and 7; without page 6 it is 24, where pages 4 and 5 are seen.
    memory._allocator.forget(page := cache._page_of[of_group(keys, 1)[6]])
    cache.evict(page)
    assert memory.find_reuse(Sequence(make_request("b", prompt), 0, (0, 0), 64, watched=False), None).num_tokens == 24
    assert num_reused("less") == 24
    assert num_reused("computed again") == 32
    loop.check_against_alone()


def test_the_next_turn_goes_on_from_the_last_full_page() -> None:
    """What a sequence keeps behind its window is enough, wherever in a page its tokens end."""
    for num_tokens in range(9, 17):
        loop = Loop(small_config(windows=(None, 6), num_pages=81, decode_steps=4))
        run(loop, make_request("turn1", make_prompt(20), max_tokens=num_tokens, ignore_eos=True))
        made = loop.finished["turn1", 0].token_ids.tolist()
        run(loop, make_request("turn2", make_prompt(20) + made + [1], max_tokens=3))
        assert loop.finished["turn2", 0].cached_tokens == (20 + num_tokens - 1) // 4 * 4


def test_completions_share_the_prompts_pages_of_all_groups() -> None:
    loop = run(
        Loop(small_config(windows=(None, 6, 6), num_pages=200)), make_request("a", make_prompt(23), max_tokens=9, n=4)
    )
    assert loop.runner.num_computed <= 23 + 3 + 4 * 9
    assert any(len(plan.page_copies) == 3 * 3 for plan in loop.plans), (
        "the last page of three groups for three children"
    )


def test_a_request_that_can_never_fit_is_refused() -> None:
    config = small_config(windows=(None, 8, 8), num_pages=16, token_budget=8)
    assert config.paging.num_needed(64) == 16 + 2 * 8 > 15 >= config.paging.num_needed(20)
    loop = Loop(config)
    with pytest.raises(CapacityError, match="needs 18 pages of 4 tokens, the whole pool has 15"):
        loop.add(make_request("a", make_prompt(22), max_tokens=8))
    run(loop, make_request("b", make_prompt(18), max_tokens=2))


def test_lower_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot come back from lower tiers"):
        small_config(windows=(None, 8), tiers=TierConfig(host_pages=4))

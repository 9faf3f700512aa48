"""Pages below the device, from outside: what goes down, what comes up, and that it is the same."""

import logging
from pathlib import Path

import pytest

from jaxkv.cache.tier import OnDisk, Tier
from jaxkv.cache.tiers import PageTiers
from jaxkv.config import TierConfig
from jaxkv.errors import ConfigError
from jaxkv.plan import MoveKind, MoveNews, PageAt, PageMove
from jaxkv.tier_mover import gather
from tests.fake_model import make_prompt, make_request, small_config
from tests.fake_runner import Loop, run
from tests.host.test_retention import flood
from tests.host.tier_stage import Below, ask, check_bytes, tiers

PREFIX = make_prompt(16)  # four pages
KEPT = ((16, 1000.0),)


def below(folder: Path, **changes) -> Below:
    """Twelve pages of four tokens on the device."""
    changes = dict(num_pages=13, max_rows=1, tiers=tiers(host_pages=6, disk_pages=20)) | changes
    return Below(small_config(**changes), folder)


def big(loop: Loop, start: int) -> None:
    """A prompt that takes the whole pool."""
    run(loop, make_request(f"big {start}", make_prompt(45, start), max_tokens=1))


def test_what_is_kept_goes_down_to_host_memory_and_comes_up(tmp_path):
    loop = below(tmp_path).start()
    assert ask(loop, [*PREFIX, 1, 2], marks=KEPT) == 0
    big(loop, 1)
    stats = loop.scheduler.stats()
    assert (stats.pages_on_host, stats.num_demoted_pages, stats.pages_cached) == (4, 4, 11)
    assert ask(loop, [*PREFIX, 9]) == 16
    stats = loop.scheduler.stats()
    assert (stats.num_host_hit_pages, stats.num_disk_hit_pages, stats.pages_on_disk) == (4, 0, 0)
    assert stats.pages_retained == 4, "up again it is still kept, although the second request did not ask"
    check_bytes(loop)


@pytest.mark.parametrize(("demote", "cached"), [("retained", 0), ("all", 16)])
def test_what_nobody_keeps_goes_down_only_if_told_to(tmp_path, demote: str, cached: int):
    loop = below(tmp_path, tiers=tiers(host_pages=12, demote=demote)).start()
    ask(loop, [*PREFIX, 1, 2])
    big(loop, 1)
    assert ask(loop, [*PREFIX, 9]) == cached


def test_what_host_memory_does_not_hold_goes_on_to_disk(tmp_path):
    stage = below(tmp_path, tiers=tiers(host_pages=2, disk_pages=20))
    loop = stage.start()
    ask(loop, [*PREFIX, 1, 2], marks=KEPT)
    big(loop, 1)
    check_bytes(loop)
    stats = loop.scheduler.stats()
    assert (stats.pages_on_host, stats.pages_on_disk, len(stage.files())) == (2, 2, 2)
    assert ask(loop, [*PREFIX, 9]) == 16
    stats = loop.scheduler.stats()
    assert (stats.num_host_hit_pages, stats.num_disk_hit_pages) == (2, 2)
    check_bytes(loop)
    assert loop.scheduler.stats().pages_in_transit == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_a_restart_finds_what_is_on_disk(tmp_path, at_once: bool):
    stage = below(tmp_path, tiers=tiers(disk_pages=20))
    stage.at_once = at_once
    loop = stage.start()
    ask(loop, [*PREFIX, 1, 2], marks=KEPT)
    big(loop, 1)
    stage.store.work()
    loop = stage.start()
    assert loop.scheduler.stats().pages_on_disk == 4
    assert ask(loop, [*PREFIX, 9]) == 16
    assert loop.runner.num_computed == 17 - 16 + 2
    check_bytes(loop)


def test_save_writes_what_the_device_has_at_once(tmp_path):
    stage = below(tmp_path)
    loop = stage.start()
    ask(loop, [*PREFIX, 1, 2])
    assert loop.scheduler.save(make_request("s", [*PREFIX, 1, 2]), 60.0) == (4, 4)
    check_bytes(loop)
    assert loop.scheduler.num_on_disk(make_request("s", PREFIX)) == 4 == len(stage.files())
    assert loop.scheduler.save(make_request("s", PREFIX), None) == (4, 4), "once is enough"
    assert not loop.scheduler.tiers.take_moves()


def test_a_longer_time_to_live_reaches_files_that_are_there(tmp_path):
    """Else a restart would know only the first one."""
    stage = below(tmp_path)
    loop = stage.start()
    ask(loop, [*PREFIX, 1, 2])
    for ttl_s, said in [(None, None), (60.0, 60.0), (9.0, 60.0), (3600.0, 3600.0)]:
        assert loop.scheduler.save(make_request("s", PREFIX), ttl_s) == (4, 4)
        check_bytes(loop)
        assert [page.ttl_s for page in stage.folder.scan()] == [said] * 4 and not stage.store.is_busy
    assert ask(stage.start(), [*PREFIX, 9]) == 16


def test_a_page_under_a_salt_is_never_found_without_it(tmp_path):
    stage = below(tmp_path, tiers=tiers(disk_pages=20))
    loop = stage.start()
    ask(loop, [*PREFIX, 1], salt="x", marks=KEPT)
    big(loop, 1)
    assert [ask(stage.start(), [*PREFIX, 9], salt=salt) for salt in ("", "y", "x")] == [0, 0, 16]


def test_others_go_on_while_one_waits_for_the_disk(tmp_path):
    stage = below(tmp_path, num_pages=30, max_rows=2, tiers=tiers(disk_pages=20))
    loop = stage.start()
    ask(loop, [*PREFIX, 1], marks=KEPT)
    loop.scheduler.save(make_request("s", PREFIX), None)
    check_bytes(loop)
    stage.at_once = False
    loop = stage.start()
    loop.add(make_request("waits", [*PREFIX, 5], max_tokens=2))
    loop.add(make_request("runs", make_prompt(9, 3), max_tokens=5))
    for _ in range(7):
        loop.step()
    assert ("runs", 0) in loop.finished and ("waits", 0) not in loop.finished
    stage.store.work()
    loop.drain()
    loop.check_against_alone()
    assert loop.finished["waits", 0].cached_tokens == 16


def test_equal_prompts_come_up_once(tmp_path):
    stage = below(tmp_path, num_pages=40, max_rows=4)
    loop = stage.start()
    ask(loop, [*PREFIX, 1])
    loop.scheduler.save(make_request("s", PREFIX), None)
    loop.mover.move()
    loop = stage.start()
    run(loop, *[make_request(f"r{i}", [*PREFIX, i, 3], max_tokens=2) for i in range(4)])
    assert [loop.finished[f"r{i}", 0].cached_tokens for i in range(4)] == [16] * 4
    assert loop.scheduler.stats().num_disk_hit_pages == 4


def test_an_abort_while_waiting_frees_what_was_read(tmp_path):
    stage = below(tmp_path)
    loop = stage.start()
    ask(loop, [*PREFIX, 1])
    loop.scheduler.save(make_request("s", PREFIX), None)
    loop.mover.move()
    stage.at_once = False
    loop = stage.start()
    loop.add(make_request("a", [*PREFIX, 5], max_tokens=2))
    loop.dispatch()
    assert loop.scheduler.stats().pages_in_transit == 4
    loop.scheduler.abort("a")
    stage.store.work()
    loop.dispatch()
    loop.dispatch()
    check_bytes(loop)
    assert loop.scheduler.stats().pages_in_transit == 0 == len(stage.store._pages)


def test_more_than_fits_beside_the_budget_waits_its_turn(tmp_path):
    stage = below(tmp_path, num_pages=60, max_rows=4, tiers=tiers(disk_pages=60, max_staged=5))
    loop = stage.start()
    prompts = [make_prompt(16, start) for start in range(4)]
    for prompt in prompts:
        ask(loop, [*prompt, 1])
        loop.scheduler.save(make_request("s", prompt), None)
        check_bytes(loop)
    stage.at_once = False
    loop = stage.start()
    for index, prompt in enumerate(prompts):
        loop.add(make_request(f"r{index}", [*prompt, 2], max_tokens=2))
    for _ in range(200):
        if not loop.scheduler.has_unfinished:
            break
        loop.step()
        check_bytes(loop)
        stage.store.work(1)
    loop.drain()
    loop.check_against_alone()
    assert [loop.finished[f"r{index}", 0].cached_tokens for index in range(4)] == [16] * 4


def test_a_full_disk_is_said_once_and_the_loop_goes_on(tmp_path, caplog):
    stage = below(tmp_path, tiers=tiers(disk_pages=20))
    loop = stage.start()
    stage.folder.is_full = True
    with caplog.at_level(logging.WARNING):
        for start in range(3):
            ask(loop, [*make_prompt(16, start), 1], marks=KEPT)
            big(loop, start + 10)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    check_bytes(loop)
    stats = loop.scheduler.stats()
    assert (stats.pages_on_disk, stats.num_disk_written_pages) == (0, 0) and stats.num_dropped_pages >= 12
    stage.folder.is_full = False
    ask(loop, [*PREFIX, 1], marks=KEPT)
    big(loop, 20)
    assert ask(loop, [*PREFIX, 9]) == 16, "when there is room again it is used"


def test_a_disk_too_slow_loses_pages_and_not_time(tmp_path):
    stage = below(tmp_path, tiers=tiers(disk_pages=20, max_outgoing=3))
    stage.at_once = False
    loop = stage.start()
    ask(loop, [*PREFIX, 1], marks=KEPT)
    big(loop, 1)
    stats = loop.scheduler.stats()
    assert (stats.pages_in_transit, stats.num_dropped_pages) == (3, 1)
    check_bytes(loop)


def test_clearing_forgets_host_memory_and_leaves_files(tmp_path):
    stage = below(tmp_path, tiers=tiers(host_pages=2, disk_pages=20))
    loop = stage.start()
    ask(loop, [*PREFIX, 1], marks=KEPT)
    big(loop, 1)
    loop.scheduler.clear_cache()
    check_bytes(loop)
    stats = loop.scheduler.stats()
    assert (stats.pages_cached, stats.pages_on_host, stats.pages_on_disk) == (0, 0, 2)
    loop.scheduler.clear_cache(b"other weights")
    assert loop.scheduler.stats().pages_on_disk == 0 and len(stage.files()) == 2
    assert ask(loop, [*PREFIX, 9]) == 0


def test_after_a_failure_nothing_in_host_memory_is_trusted(tmp_path):
    stage = below(tmp_path)
    stage.at_once = False
    loop = stage.start()
    ask(loop, [*PREFIX, 1], marks=KEPT)
    loop.add(make_request("dies", make_prompt(45, 1), max_tokens=1))
    loop.scheduler.plan(loop.now_s)  # evicts what is kept; its moves are never carried out
    loop.scheduler.fail_all("the device failed")
    loop.mover.store.reset()
    assert not loop.scheduler.tiers.take_moves()
    stage.store.work()
    check_bytes(loop)
    assert loop.scheduler.stats().pages_on_host == 0 == loop.scheduler.stats().pages_in_transit


def test_a_device_that_loses_pages_on_the_way_loses_nothing_else(tmp_path, caplog):
    stage = below(tmp_path)
    loop = stage.start()
    ask(loop, [*PREFIX, 1], marks=KEPT)
    read = loop.runner.read_pages

    class Lost:
        def result(self):
            raise RuntimeError("gone")

    loop.runner.read_pages = lambda pages: Lost()  # type: ignore[method-assign, assignment, return-value]
    big(loop, 1)
    assert "lost on the way from the device: gone" in caplog.text
    check_bytes(loop)
    assert loop.scheduler.stats().pages_on_host == 0
    loop.runner.read_pages = read
    assert ask(loop, [*PREFIX, 9]) == 0


def test_the_last_used_stay_in_each_tier(tmp_path):
    loop = below(tmp_path, tiers=tiers(host_pages=4, demote="all")).start()
    for start in (0, 1):
        ask(loop, [*make_prompt(16, start), 1, 2])
        big(loop, start + 10)
    flood(loop, 2)
    assert len(loop.scheduler.tiers.host) == 4
    loop.scheduler.tiers.check()


# --- decisions alone -------------------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def down(kept: PageTiers, number: int, ttl_s: float | None = None) -> None:
    kept.demote(key(number), PageAt(0, number), (key(number - 1), number), ttl_s)


def kinds(kept: PageTiers) -> list[tuple[MoveKind, int]]:
    return [(move.kind, int.from_bytes(move.key, "big")) for move in kept.take_moves()]


def test_a_page_nobody_keeps_never_displaces_a_kept_one():
    kept = PageTiers(tiers(host_pages=2, demote="all"))
    down(kept, 1, 100.0)
    down(kept, 2)
    down(kept, 3)
    assert kinds(kept) == [
        (MoveKind.DOWN, 1), (MoveKind.DOWN, 2), (MoveKind.DROP, 2), (MoveKind.DOWN, 3),
    ]  # fmt: skip
    down(kept, 4, 50.0)
    down(kept, 5)
    assert kept.run([key(1)]) and kept.run([key(4)]) and not kept.run([key(5)])
    kept.advance(60.0)
    down(kept, 6)
    assert not kept.run([key(4)]) and kept.run([key(6)]), "its time was over"


def test_what_a_plan_brings_up_is_not_displaced_by_what_makes_room_for_it():
    kept = PageTiers(tiers(host_pages=2))
    down(kept, 1, 9.0)
    down(kept, 2, 9.0)
    kept.hold([key(1), key(2)])
    down(kept, 3, 99.0)
    kept.promote([key(1), key(2)], [PageAt(0, 8), PageAt(0, 9)])
    assert kinds(kept)[2:] == [(MoveKind.UP, 1), (MoveKind.UP, 2)]
    assert kept.counts.num_dropped == 1
    kept.start_round(is_wanted=False)
    down(kept, 3, 99.0)
    assert kept.run([key(3)])


def test_an_earlier_processes_pages_count_by_age_and_budget():
    kept = PageTiers(tiers(disk_pages=2))
    kept.restore([OnDisk(key(1), None, 30.0), OnDisk(key(2), 40.0, 35.0), OnDisk(key(3), None, 10.0)], 1000.0)
    assert kinds(kept) == [(MoveKind.UNLINK, 1)], "nobody kept it, and it is older than 3"
    kept.advance(1006.0)  # 2 was kept for 40 s, of which 35 had passed
    down(kept, 4, 5.0)
    assert kinds(kept)[0] == (MoveKind.UNLINK, 3), "2 counts as just used when its time is over"


def test_impossible_budgets_are_refused():
    with pytest.raises(ConfigError, match="host_pages=-1 must be >= 0"):
        TierConfig(host_pages=-1)
    with pytest.raises(ConfigError, match="demote='none' must be one of retained, all"):
        TierConfig(demote="none")


def test_what_is_over_is_worth_no_more_below_than_what_nobody_keeps():
    kept = PageTiers(tiers(host_pages=1, disk_pages=2, demote="all"))
    down(kept, 1, 5.0)
    kept.advance(10.0)
    down(kept, 2, 100.0)  # 1 goes on to disk, and its time is over
    assert kinds(kept) == [(MoveKind.DOWN, 1), (MoveKind.WRITE, 1), (MoveKind.DOWN, 2)]
    assert kept.ttl_s(key(1)) is None and kept.ttl_s(key(2)) == 100.0


def test_one_that_is_over_is_not_kept_anew_by_being_used():
    tier = Tier(2)
    tier.add(key(1), 5.0)
    tier.advance(10.0)
    tier.touch(key(1))
    tier.pin(key(1))
    tier.unpin(key(1))
    assert tier.ttl_s(key(1)) is None and tier.pop(for_kept=False) == (key(1), None)
    tier.add(key(2), 50.0, left_s=1.0)
    tier.touch(key(2))
    tier.advance(40.0)
    assert tier.pop(for_kept=False) is None and tier.ttl_s(key(2)) == 50.0, (
        "what is used in time is kept all of it again"
    )
    tier.check()


def test_a_reset_still_removes_files_that_made_room():
    kept = PageTiers(tiers(disk_pages=1))
    kept.restore([OnDisk(key(1), None, 30.0)], 0.0)
    down(kept, 2, 9.0)
    kept.reset()
    assert kinds(kept) == [(MoveKind.UNLINK, 1)]
    kept.check()


def test_read_pages_that_go_down_again_leave_no_trace():
    """Read from disk, lost there, and given up by the device once more, all while they lie beside the budget."""
    kept = PageTiers(tiers(host_pages=1, disk_pages=1, demote="all"))
    kept.restore([OnDisk(key(1), None, 30.0)], 0.0)
    assert not kept.is_ready(kept.run([key(1)]))
    kept.heed([MoveNews(MoveKind.READ, key(1), True)])
    assert kept.is_ready([key(1)])
    kept.save(key(7), PageAt(0, 7), (key(6), 7), None)  # takes the disk's only place
    down(kept, 1)
    down(kept, 2)
    kept.check()
    kept.start_round(is_wanted=False)
    kept.check()


def test_pages_to_read_that_are_gone_are_not_asked_for():
    kept = PageTiers(tiers(disk_pages=1))
    assert not kept.is_ready([key(1)]) and not kinds(kept)


def test_pages_go_down_together_unless_that_would_change_what_is_read():
    def move(kind: MoveKind, number: int) -> PageMove:
        return PageMove(kind, key(number), PageAt(0, number))

    d, u, w, x = MoveKind.DOWN, MoveKind.UP, MoveKind.WRITE, MoveKind.DROP
    for before, after in [
        ([(d, 1), (w, 1), (d, 2), (w, 2)], [(d, 1), (d, 2), (w, 1), (w, 2)]),
        ([(d, 1), (x, 9), (u, 1), (d, 2)], [(d, 1), (x, 9), (u, 1), (d, 2)]),
        ([(w, 1), (x, 1), (d, 2), (d, 1)], [(d, 2), (w, 1), (x, 1), (d, 1)]),
    ]:
        assert gather([move(*one) for one in before]) == [move(*one) for one in after]


def test_what_a_session_holds_goes_down_and_is_promised(tmp_path):
    loop = below(tmp_path, tiers=tiers(host_pages=3, disk_pages=20)).start()
    ask(loop, [*PREFIX, 1, 2])
    hold = loop.scheduler.holds.take(PREFIX, "")
    big(loop, 1)
    stats = loop.scheduler.stats()
    assert stats.num_held_evictions == stats.num_demoted_pages == 4 and stats.num_dropped_pages == 0
    assert loop.scheduler.holds.look_up(hold).num_pages == 4
    assert ask(loop, [*PREFIX, 9]) == 16
    assert loop.scheduler.stats().pages_retained == 0, "it is held, not kept by a deadline"
    loop.scheduler.holds.end(hold)
    check_bytes(loop)


def test_nobody_waits_for_a_prefix_that_comes_up_under_another_salt(tmp_path):
    stage = below(tmp_path, num_pages=40, max_rows=4)
    loop = stage.start()
    ask(loop, [*PREFIX, 1], salt="x")
    loop.scheduler.save(make_request("s", PREFIX, salt="x"), None)
    check_bytes(loop)
    stage.at_once = False
    loop = stage.start()
    loop.add(make_request("theirs", [*PREFIX, 5], max_tokens=2, salt="x"))
    loop.add(make_request("ours", [*PREFIX, 5], max_tokens=2))
    loop.dispatch()
    assert loop.plans[-1].chunks and loop.scheduler.stats().num_running == 1, "ours is computed at once"
    stage.store.work()
    loop.drain()
    assert loop.finished["ours", 0].cached_tokens == 0 and loop.finished["theirs", 0].cached_tokens == 16

"""Sessions on a device made of plain Python: tokens, what is kept, what is given back."""

import gc

import pytest

from jaxkv.errors import RequestError
from jaxkv.request import FinishReason
from jaxkv.sessions.session import SessionReport
from tests.fake_model import make_prompt
from tests.session_stage import EOS, PAGE, check_alone, check_idle, fake_llm, params, tokens_of

HEAD = make_prompt(18)  # four full pages and two tokens


def flood(llm, num: int = 6) -> None:
    """Other prompts, through every page of the pool."""
    for number in range(num):
        llm.generate([make_prompt(60, number + 10)], params(2), progress=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_turns_give_what_the_prompt_alone_gives_and_find_what_was_promised(overlap: bool):
    llm = fake_llm(overlap=overlap)
    with llm.session(HEAD) as session:
        said = list(HEAD)
        for turn in range(5):
            more = make_prompt(3 + turn, turn + 1)
            promised = session.report()
            output = session.generate(more, params())
            said += more
            assert list(output.prompt_token_ids) == said
            assert output.cached_tokens == promised.kept_tokens, (turn, promised)
            check_alone(output, params())
            said += [token for token in tokens_of(output) if token != EOS]
            assert session.token_ids == said
            assert session.report().kept_tokens >= (len(said) - 1) // PAGE * PAGE
    check_idle(llm)


def test_nothing_is_computed_before_it_is_asked_for_and_prefill_computes_it():
    llm = fake_llm()
    session = llm.session(HEAD)
    assert session.report() == SessionReport(num_tokens=18, kept_tokens=0, recomputed_tokens=18, shared_pages=0)
    assert llm._engine.stats().num_steps == 0
    assert session.prefill() == SessionReport(num_tokens=18, kept_tokens=16, recomputed_tokens=2, shared_pages=0)
    assert session.token_ids == HEAD
    assert session.generate([1], params()).cached_tokens == 16


def test_forks_share_pages_run_in_one_batch_and_go_their_own_ways():
    llm = fake_llm()
    root = llm.session(HEAD)
    root.prefill()
    forks = [root.fork() for _ in range(3)]
    assert all(fork.report().shared_pages == 4 and fork.report().kept_tokens == 16 for fork in forks)
    turns = [fork.start([number], params(8)) for number, fork in enumerate(forks)]
    llm._engine.step()
    stats = llm._engine.stats()
    assert stats.num_running == 3, "all three run at once"
    assert stats.pages_used <= 4 + 3 * 4, "four pages are there once"
    outputs = [turn.result() for turn in turns]
    for number, (fork, output) in enumerate(zip(forks, outputs, strict=True)):
        assert output.cached_tokens == 16
        check_alone(output, params(8))
        assert fork.token_ids[:19] == [*HEAD, number]
    assert len({tuple(fork.token_ids) for fork in forks}) == 3 and root.token_ids == HEAD
    assert root.report().shared_pages == 4
    for fork in forks:
        fork.close()
    assert root.report().shared_pages == 0
    root.close()
    check_idle(llm)


def test_forks_of_a_prefix_nobody_computed_compute_it_once():
    llm = fake_llm()
    root = llm.session(HEAD)
    turns = [root.fork().start([number], params(4)) for number in range(3)]
    cached = sorted(turn.result().cached_tokens for turn in turns)
    assert cached == [0, 16, 16]


def test_truncate_keeps_the_head():
    llm = fake_llm()
    session = llm.session(HEAD)
    session.generate(make_prompt(10, 3), params(8))
    report = session.truncate(21)
    assert report == SessionReport(num_tokens=21, kept_tokens=20, recomputed_tokens=1, shared_pages=0)
    assert session.token_ids == [*HEAD, *make_prompt(10, 3)[:3]]
    output = session.generate([7], params())
    assert output.cached_tokens == 20
    check_alone(output, params())
    assert session.truncate(0) == SessionReport(num_tokens=0, kept_tokens=0, recomputed_tokens=0, shared_pages=0)
    session.close()
    check_idle(llm)


def test_replacing_the_tail_keeps_the_stable_head():
    llm = fake_llm()
    session = llm.session(HEAD)
    session.generate(make_prompt(20, 3), params(8))
    report = session.replace_tail([40, 41, 42], 17)
    assert report == SessionReport(num_tokens=20, kept_tokens=16, recomputed_tokens=4, shared_pages=0)
    assert session.token_ids == [*HEAD[:17], 40, 41, 42]
    output = session.generate([1], params())
    assert output.cached_tokens == 16
    check_alone(output, params())


@pytest.mark.parametrize("eviction", ["lru", "cost", "adaptive"])
def test_an_open_session_keeps_its_pages_and_a_closed_one_does_not(eviction: str):
    llm = fake_llm(eviction=eviction)
    session = llm.session(HEAD)
    session.prefill()
    flood(llm)
    assert session.report().kept_tokens == 16 and llm._engine.stats().pages_held == 4
    check_idle(llm, num_held=4)
    session.close()
    flood(llm)
    assert llm.session(HEAD).report().kept_tokens == 0
    assert llm._engine.stats().num_held_evictions == 0


def test_what_a_session_holds_goes_when_nothing_else_is_left_and_comes_back():
    llm = fake_llm(num_pages=13, max_rows=1)  # twelve pages; sessions may hold nine
    session = llm.session(make_prompt(32))
    session.prefill()
    assert llm._engine.stats().pages_held == 8
    large = params(6)
    (output,) = llm.generate([make_prompt(38, 5)], large, progress=False)  # eleven pages
    check_alone(output, large)
    stats = llm._engine.stats()
    assert stats.num_held_evictions == 7 and stats.pages_held == 1
    assert session.report().kept_tokens == 4, "the tail goes first"
    output = session.generate([1], params())
    assert output.cached_tokens == 4
    check_alone(output, params())
    assert llm._engine.stats().pages_held == 9, "what is computed again is held again"
    session.close()
    check_idle(llm)


def test_sessions_hold_three_quarters_of_the_pool_at_most():
    llm = fake_llm(num_pages=41)
    sessions = [llm.session(make_prompt(48, number)) for number in range(3)]  # twelve pages each
    for session in sessions:
        session.prefill()
    assert llm._engine.stats().pages_held == 30
    llm._engine.scheduler.check()
    for session in sessions[:2]:
        session.close()
    assert llm._engine.stats().pages_held == 6, "what was beyond the limit is not held in hindsight"
    sessions[2].generate([1], params(2))
    assert llm._engine.stats().pages_held == 12
    sessions[2].close()
    check_idle(llm)


def test_a_cancelled_turn_keeps_what_it_generated():
    llm = fake_llm(decode_steps=1)
    session = llm.session(HEAD)
    turn = session.start([5], params(30))
    for _ in range(6):
        llm._engine.step()
    assert session.is_running and session.token_ids == HEAD
    turn.cancel()
    assert turn.output is not None and turn.output.outputs[0].finish_reason is FinishReason.ABORT
    check_alone(turn.output, params(30))
    assert 0 < len(tokens_of(turn.output)) < 30
    assert session.token_ids == [*HEAD, 5, *tokens_of(turn.output)]
    output = session.generate([6], params())
    assert output.cached_tokens >= 16
    check_alone(output, params())
    session.close()
    check_idle(llm)


def test_a_turn_aborted_in_the_middle_of_its_prompt():
    llm = fake_llm(token_budget=8)
    session = llm.session(make_prompt(30))
    turn = session.start([], params())
    llm._engine.step()
    turn.cancel()
    assert session.token_ids == make_prompt(30)
    check_alone(session.generate([3], params()), params())


def test_a_closed_stream_is_part_of_the_session_up_to_there():
    llm = fake_llm(decode_steps=1)
    session = llm.session(HEAD)
    stream = session.stream([5], params(20))
    for _ in range(4):
        llm._engine.step()
    with pytest.raises(RequestError, match="a turn of this session is running"):
        session.generate([1])
    stream.close()
    assert stream.output is not None
    assert session.token_ids == [*HEAD, 5, *tokens_of(stream.output)]


def test_an_interrupted_result_cancels_the_turn(monkeypatch: pytest.MonkeyPatch):
    llm = fake_llm()
    session = llm.session(HEAD)
    turn = session.start([5], params(20))
    monkeypatch.setattr(llm._engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        turn.result()
    monkeypatch.undo()
    assert not session.is_running
    check_idle(llm)


def test_a_failed_turn_leaves_the_session_as_it_was():
    llm = fake_llm()
    session = llm.session(HEAD)
    session.prefill()
    turn = session.start([5], params(20))
    llm._engine._fail_all("the device failed")
    assert turn.result().outputs[0].finish_reason is FinishReason.ERROR
    assert session.token_ids == HEAD and session.report().kept_tokens == 0
    check_alone(session.generate([5], params()), params())
    session.close()
    check_idle(llm)


def test_closing_and_dropping_give_back_what_was_held():
    llm = fake_llm()
    session = llm.session(HEAD)
    session.generate([5], params())
    turn = session.start([6], params(20))
    session.close()
    session.close()
    assert turn.output is not None
    check_idle(llm)
    for use in (session.report, session.fork, session.generate, lambda: session.truncate(3)):
        with pytest.raises(RequestError, match="the session is closed"):
            use()
    dropped = llm.session(HEAD)
    dropped.generate([5], params())
    assert llm._engine.stats().pages_held > 0
    del dropped
    gc.collect()
    llm.generate([[1, 2]], params(1), progress=False)
    check_idle(llm)


def test_a_stream_outlives_the_name_of_its_session():
    llm = fake_llm()
    stream = llm.session(HEAD).stream([5], params(6))
    gc.collect()
    assert list(stream) == [] and stream.output is not None  # no tokenizer: no text
    check_alone(stream.output, params(6))


def test_salts_keep_sessions_apart():
    llm = fake_llm()
    first, second = (llm.session(HEAD, cache_salt=salt) for salt in ("a", "b"))
    first.prefill()
    assert first.report().kept_tokens == 16 and second.report().kept_tokens == 0
    assert first.fork().generate([1], params()).cached_tokens == 16
    assert second.generate([1], params()).cached_tokens == 0


def test_on_two_shards_a_session_finds_its_pages_again():
    llm = fake_llm(num_shards=2, num_pages=21)
    sessions = [llm.session(make_prompt(18, number)) for number in range(4)]
    for turn in range(3):
        promised = [session.report().kept_tokens for session in sessions]
        turns = [session.start([turn], params(3)) for session in sessions]
        for session_turn, kept in zip(turns, promised, strict=True):
            output = session_turn.result()
            assert output.cached_tokens == kept
            check_alone(output, params(3))
    for session in sessions:
        session.close()
    check_idle(llm)


def test_without_a_prefix_cache_a_session_computes_everything_again():
    llm = fake_llm(prefix_cache=False)
    with llm.session(HEAD) as session:
        for number in range(3):
            output = session.generate([number], params())
            assert output.cached_tokens == 0
            check_alone(output, params())
        assert session.report().kept_tokens == 0


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.truncate(), "exactly one of num_tokens, messages and turns"),
        (lambda s: s.truncate(3, messages=1), "exactly one of num_tokens, messages and turns"),
        (lambda s: s.truncate(19), "num_tokens=19 must be a whole number between 0 and 18"),
        (lambda s: s.truncate(-1), "num_tokens=-1 must be a whole number between 0 and 18"),
        (lambda s: s.truncate(True), "num_tokens=True must be a whole number between 0 and 18"),
        (lambda s: s.truncate(messages=1), "only chat sessions have messages and turns"),
        (lambda s: s.replace_tail("text", 3), "no tokenizer; pass token ids"),
        (lambda s: s.replace_tail([1, 2.5], 3), "token id 2.5 must be a whole number"),
        (lambda s: s.replace_tail([2**31], 3), "token id 2147483648 must be a whole number"),
        (lambda s: s.chat("hello"), "chat: only a session that began with messages"),
        (lambda s: s.messages, "messages: only a session that began with messages"),
        (lambda s: s.generate([1], params(n=2)), "n=2: a session's turn has one completion"),
        (lambda s: s.generate(make_prompt(60)), "exceeds max_len=64"),
        (lambda s: s.generate([50]), "token id 50 is outside the vocabulary"),
    ],
)
def test_what_is_refused_leaves_the_session_as_it_was(use, message: str):
    llm = fake_llm()
    session = llm.session(HEAD)
    with pytest.raises(RequestError, match=message):
        use(session)
    assert session.token_ids == HEAD and not session.is_running
    check_alone(session.generate([1], params()), params())


def test_a_chat_needs_a_template():
    llm = fake_llm()
    with pytest.raises(RequestError, match="this model has no chat template"):
        llm.session([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="begin the session with messages"):
        llm.session([1, 2], tools=[{}])
    with pytest.raises(RequestError, match="no tokenizer; pass token ids"):
        llm.session("text")

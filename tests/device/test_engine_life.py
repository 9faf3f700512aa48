"""Requests that do not end by themselves, and what must go on when something breaks (behaviours 24, 35)."""

import types

import jax
import numpy as np
import pytest

from jaxkv import engine as engine_module
from jaxkv.device.runner import InFlight, Runner
from jaxkv.errors import CapacityError, RequestError
from jaxkv.request import FinishReason
from jaxkv.stream import TextStream
from tests.device.dense import Dense
from tests.device.engine_stage import Bytes, Client, ask, check_tokens, make_tokenizer, only
from tests.device.stage import MAX_LEN, PAGE, V

TEXT = tuple(np.random.default_rng(8).integers(3, V, 120).tolist())
LONG = ask(TEXT[:50], temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
OTHER = ask(TEXT[60:80], max_tokens=30, ignore_eos=True)


# --- cancelled, late, doubled, refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_steps", range(7))
def test_abort_and_resend(runner: Runner, dense: Dense, num_steps: int, overlap: bool) -> None:
    """Before, in the middle of and after its prefill (chunks of 16): as if it had never been (behaviour 4)."""
    client = Client(runner, overlap=overlap, token_budget=24, decode_steps=4)
    other = client.submit(OTHER)
    aborted = client.submit(LONG, name="again")
    for _ in range(num_steps):
        client.engine.step()
    client.engine.abort("again")
    assert aborted.output is not None
    completion = only(aborted.output)
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids == dense.generate(LONG.row())[: len(completion.token_ids)]
    resent, other = client.run(client.submit(LONG, name="again"), other)
    check_tokens(resent, LONG, dense)
    check_tokens(other, OTHER, dense)
    client.check_idle()


def test_abort_frees_pages_at_once(runner: Runner) -> None:
    client = Client(runner)
    client.submit(LONG, name="a")
    for _ in range(3):
        client.engine.step()
    assert client.engine.stats().pages_used > 0
    client.engine.abort("a")
    assert client.engine.stats().pages_used == 0
    client.engine.abort("a")
    client.engine.abort("never seen")
    client.check_idle()


def test_abort_of_forks(runner: Runner, dense: Dense) -> None:
    """All completions end, running and waiting ones."""
    client = Client(runner, token_budget=24)
    forks = client.submit(ask(TEXT[:12], n=6, temperature=1.0, max_tokens=60, ignore_eos=True), name="forks")
    for _ in range(3):
        client.engine.step()
    client.engine.abort("forks")
    assert forks.output is not None
    assert {completion.finish_reason for completion in forks.output.outputs} == {FinishReason.ABORT}
    check_tokens(client.generate(OTHER)[0], OTHER, dense)
    client.check_idle()


def test_deadline_keeps_the_partial_text(runner: Runner, dense: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(engine_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    tokenizer = make_tokenizer()
    client = Client(runner, tokenizer, decode_steps=4)
    late, other = client.submit(LONG, deadline_s=110.0), client.submit(OTHER)
    never_ran = client.submit(LONG, deadline_s=99.0)
    for _ in range(5):
        client.engine.step()
    assert never_ran.output is not None and only(never_ran.output).token_ids == ()
    assert late.output is None
    now[0] = 110.0
    client.engine.step()
    assert late.output is not None
    completion = only(late.output)
    assert completion.finish_reason is FinishReason.ABORT
    tokens = dense.generate(LONG.row())
    assert 0 < len(completion.token_ids) < len(tokens)
    assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert completion.text == tokenizer.decode(completion.token_ids)
    check_tokens(client.run(other)[0], OTHER, dense)
    client.check_idle()


def test_an_id_in_use_is_refused(runner: Runner, dense: Dense) -> None:
    """The first request does not notice; afterwards the id is free."""
    client = Client(runner)
    first = client.submit(LONG, name="same")
    client.engine.step()
    with pytest.raises(RequestError, match="'same' is in use"):
        client.submit(OTHER, name="same")
    check_tokens(client.run(first)[0], LONG, dense)
    check_tokens(client.run(client.submit(OTHER, name="same"))[0], OTHER, dense)
    client.check_idle()


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ((), RequestError, "at least one token"),
        ((1,) * MAX_LEN, RequestError, "max_len=96"),
        ((1,) * (8 * PAGE), CapacityError, "9 pages of 8 tokens, the whole pool has 8"),
        ((V,), RequestError, "outside the vocabulary"),
        ((-1,), RequestError, "outside the vocabulary"),
    ],
)
def test_what_can_never_run_is_refused(runner: Runner, dense: Dense, prompt, error, message: str) -> None:
    """Neighbours are untouched, and nothing of it stays behind (behaviours 10, 30)."""
    client = Client(runner, num_pages=9)
    other = client.submit(OTHER)
    with pytest.raises(error, match=message):
        client.submit(ask(prompt), name="refused")
    check_tokens(client.run(other)[0], OTHER, dense)
    client.check_idle()
    assert client.submit(OTHER, name="refused") is not None


@pytest.mark.parametrize("seed", range(4))
def test_storm(runner: Runner, dense: Dense, seed: int) -> None:
    """Requests come at any time and many are cancelled; what ends by itself is right, and every page comes back."""
    rng = np.random.default_rng(seed)
    client = Client(
        runner, num_pages=16, token_budget=24, overlap=bool(seed % 2), decode_steps=(1, 4)[seed // 2],
        prefix_cache=seed != 3,
    )  # fmt: skip
    running: dict[str, tuple] = {}
    num_right = 0
    for number in range(40):
        start, length = int(rng.integers(0, 30)), int(rng.integers(1, 60))
        what = ask(
            TEXT[start : start + length], temperature=float(rng.integers(0, 2)), seed=int(rng.integers(0, 9)),
            n=int(rng.choice([1, 1, 1, 3])), max_tokens=int(rng.integers(1, 25)),
        )  # fmt: skip
        running[f"s{number}"] = what, client.submit(what, name=f"s{number}", stream=bool(rng.integers(0, 2)))
        for _ in range(int(rng.integers(0, 6))):
            client.engine.step()
        if rng.random() < 0.4:
            client.engine.abort(str(rng.choice([*running])))
    for what, builder in running.values():
        output = client.run(builder)[0]
        reasons = {completion.finish_reason for completion in output.outputs}
        if FinishReason.ABORT not in reasons:
            check_tokens(output, what, dense)
            num_right += 1
    assert num_right >= 15
    client.check_idle()


# --- broken ----------------------------------------------------------------------------------------------------------


def break_dispatch(monkeypatch: pytest.MonkeyPatch, runner: Runner, error: BaseException) -> None:
    def fail(params: object, pool: jax.Array, *args: object) -> None:
        monkeypatch.undo()
        pool.delete()  # it was donated
        raise error

    monkeypatch.setattr(runner._programs, "decode", fail)


def break_result(monkeypatch: pytest.MonkeyPatch, runner: Runner, error: BaseException) -> None:
    def fail(self: InFlight) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(InFlight, "result", fail)


@pytest.mark.parametrize("break_", [break_dispatch, break_result])
@pytest.mark.parametrize("overlap", [True, False])
def test_device_failure(runner: Runner, dense: Dense, monkeypatch, break_, overlap: bool) -> None:
    """Every request ends with the reason; the engine, with an empty cache, serves the next ones."""
    client = Client(runner, overlap=overlap, decode_steps=4)
    builders = [client.submit(LONG), client.submit(OTHER), *(client.submit(LONG) for _ in range(5))]
    for _ in range(3):
        client.engine.step()
    break_(monkeypatch, runner, jax.errors.JaxRuntimeError("INTERNAL: out of luck"))
    outputs = client.run(*builders)
    for output in outputs:
        completion = only(output)
        assert completion.finish_reason is FinishReason.ERROR
        assert completion.error == "the device failed: INTERNAL: out of luck"
    client.check_idle()
    assert client.engine.stats().pages_cached == 0, "what the cache knew is gone with the pool"
    for output, what in zip(client.generate(LONG, OTHER), (LONG, OTHER), strict=True):
        check_tokens(output, what, dense)
    client.check_idle()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug")], ids=["ctrl-c", "bug"])
@pytest.mark.parametrize("break_", [break_dispatch, break_result])
@pytest.mark.parametrize("overlap", [True, False])
def test_interrupted_step(
    runner: Runner, dense: Dense, monkeypatch, break_, overlap: bool, error: BaseException
) -> None:
    """It reaches the caller; the engine has ended what ran and can be used again (a notebook goes on after Ctrl-C)."""
    client = Client(runner, overlap=overlap)
    builder = client.submit(LONG)
    break_(monkeypatch, runner, error)
    with pytest.raises(type(error)):
        client.run(builder)
    assert builder.output is not None and only(builder.output).finish_reason is FinishReason.ERROR
    client.check_idle()
    check_tokens(client.generate(LONG)[0], LONG, dense)
    client.check_idle()


@pytest.mark.parametrize("method", ["feed", "finish"])
def test_interrupted_delivery(runner: Runner, dense: Dense, monkeypatch, method: str) -> None:
    """Ctrl-C while texts are made: no request waits for ever for an ending that was lost on the way."""
    client = Client(runner)
    builders = [client.submit(what, stream=True) for what in (LONG, OTHER)]

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(builders[0], method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.run(*builders)
    for builder in builders:
        assert builder.output is not None and only(builder.output).finish_reason in (*FinishReason,)
    client.check_idle()
    check_tokens(client.generate(LONG)[0], LONG, dense)
    client.check_idle()


def test_a_stream_that_is_dropped_cancels(runner: Runner) -> None:
    """Closed before its first piece, closed later, or garbage-collected in the middle of somebody else's step."""
    client = Client(runner, make_tokenizer(Bytes()))
    for num_pieces in (0, 2):
        stream = TextStream(client.engine, client.submit(LONG, stream=True))
        for _ in range(num_pieces):
            next(stream)
        stream.close()
        assert list(stream) == []
        client.check_idle()
    dropped = [TextStream(client.engine, client.submit(LONG, stream=True))]
    other = client.submit(OTHER)
    plan = client.engine.scheduler.plan
    client.engine.scheduler.plan = lambda now_s: (dropped.clear(), plan(now_s))[1]  # type: ignore[method-assign]
    client.run(other)
    assert not client.engine.has_unfinished
    client.check_idle()


class Broken(Bytes):
    """Cannot spell one token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == self._token:
            raise ValueError(f"no bytes for {token_id}")
        return super().token_bytes(token_id)


@pytest.mark.parametrize("decode_steps", [1, 8])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_text_that_cannot_be_made(runner: Runner, dense: Dense, place: int, stream: bool, decode_steps: int) -> None:
    """Its request ends with an error, at any token and however it is read; the others do not notice."""
    tokens = dense.generate(LONG.row())
    bad = tokens[place]
    others = [ask(TEXT[60:80], max_tokens=30, ignore_eos=True, allowed_token_ids=tuple(t for t in range(V) if t != bad)),
              ask(TEXT[90:99], max_tokens=5, allowed_token_ids=tuple(t for t in range(V) if t != bad))]  # fmt: skip
    client = Client(runner, make_tokenizer(Broken(bad)), decode_steps=decode_steps)
    builders = [client.submit(what, stream=stream) for what in (others[0], LONG, others[1])]
    first, failed, second = client.run(*builders)
    completion = only(failed)
    assert completion.finish_reason is FinishReason.ERROR
    assert completion.error == f"output text failed: no bytes for {bad}"
    assert completion.token_ids == tokens[: len(completion.token_ids)]
    for output, what in zip((first, second), others, strict=True):
        check_tokens(output, what, dense)
    client.check_idle()


def test_a_text_of_one_child_that_cannot_be_made(runner: Runner, dense: Dense) -> None:
    what = ask(TEXT[:12], temperature=1.0, seed=6, max_tokens=12, ignore_eos=True, n=3)
    tokens = [dense.generate(what.row(child)) for child in range(3)]
    bad = next(token for token in tokens[1] if token not in tokens[0] + tokens[2])
    output = Client(runner, make_tokenizer(Broken(bad))).generate(what)[0]
    reasons = [completion.finish_reason for completion in output.outputs]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert [output.outputs[child].token_ids for child in (0, 2)] == [tokens[0], tokens[2]]

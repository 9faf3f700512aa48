"""Steps on the device against the dense model: what `plan.py` promises, with hand-written plans."""

import numpy as np
import pytest

from jaxkv.device.runner import Runner
from tests.device.dense import Dense
from tests.device.sampling import Row, row
from tests.device.stage import MAX_LEN, PAGE, Stage, V, decoded, sampled

RNG = np.random.default_rng(0)
TOKENS = tuple(RNG.integers(0, V, MAX_LEN).tolist())


def greedy(prompt_len: int = 11, **fields) -> Row:
    return row(prompt=TOKENS[:prompt_len], **(dict(temperature=0, max_tokens=20) | fields))


def seeded(prompt_len: int = 13, **fields) -> Row:
    return row(prompt=TOKENS[5 : 5 + prompt_len], **(dict(seed=3, max_tokens=20) | fields))


# --- prefill and decode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 16, 17, 40, 63, 64])
def test_prompts_of_any_length(runner: Runner, dense: Dense, prompt_len: int) -> None:
    """In one chunk, then decoded across a page border."""
    r, stage = greedy(prompt_len, max_tokens=10), Stage(runner)
    tokens = [stage.prefill(2, r), *decoded(stage.run(decode=(2,), steps=8))[0]]
    assert tuple(tokens) == dense.generate(r)[:9]


@pytest.mark.parametrize("borders", [(8,), (8, 16), (16, 24, 32), (8, 16, 24, 32)])
@pytest.mark.parametrize("prompt_len", [33, 40])
def test_prompts_in_chunks(runner: Runner, dense: Dense, prompt_len: int, borders: tuple[int, ...]) -> None:
    """Two to five chunks; only the last samples."""
    r, stage = greedy(prompt_len), Stage(runner)
    stage.place(0, r)
    results = [stage.run(stage.chunk(0, a, b)) for a, b in zip((0, *borders), (*borders, None), strict=True)]
    assert [len(sampled(result)) for result in results] == [0] * len(borders) + [1]
    tokens = sampled(results[-1]) + decoded(stage.run(decode=(0,), steps=4))[0]
    assert tuple(tokens) == dense.generate(r)[:5]


def test_many_steps_equal_single_steps(runner: Runner, dense: Dense) -> None:
    """Greedy and seeded rows; plans dispatched before any of them was read."""
    rows = [greedy(), seeded(), greedy(30, repetition_penalty=1.5, presence_penalty=0.5)]

    def generate(*steps: int) -> list[list[int]]:
        stage = Stage(runner)
        for at, r in enumerate(rows):
            stage.place(at, r)
        flights = [stage.dispatch(*(stage.chunk(at) for at in range(3)))]
        flights += [stage.dispatch(decode=(0, 1, 2), steps=n) for n in steps]
        first, *rest = [flight.result() for flight in flights]
        outputs = [[token] for token in sampled(first)]
        for result in rest:
            for output, tokens in zip(outputs, decoded(result), strict=True):
                output += tokens
        return outputs

    expected = [list(dense.generate(r)[:9]) for r in rows]
    assert generate(8) == expected
    assert generate(*[1] * 8) == expected
    assert generate(3, 1, 4) == expected


def test_mixed_equals_prefill_then_decode(runner: Runner, dense: Dense) -> None:
    """Decode rows and chunks of other rows in one step, in any order of rows."""
    one, two, three = greedy(), seeded(17), greedy(25, max_tokens=9)
    stage = Stage(runner)
    outputs = {3: [stage.prefill(3, one)], 0: [], 1: []}
    stage.place(1, two)
    result = stage.run(stage.chunk(1, 0, 8), decode=(3,))
    outputs[3] += decoded(result)[0]
    stage.place(0, three)
    result = stage.run(stage.chunk(1, 8), stage.chunk(0), decode=(3,))
    outputs[3] += decoded(result)[0]
    outputs[1], outputs[0] = ([token] for token in sampled(result))
    for _ in range(2):
        for at, tokens in zip((0, 3, 1), decoded(stage.run(decode=(0, 3, 1), steps=3)), strict=True):
            outputs[at] += tokens
    for at, r in ((3, one), (1, two), (0, three)):
        assert tuple(outputs[at]) == dense.generate(r)[: len(outputs[at])]


# --- stopping --------------------------------------------------------------------------------------------------------


def generate(stage: Stage, r: Row, steps: int = 4) -> list[int]:
    """All of a row's output, until the device says that it is done."""
    tokens = [stage.prefill(1, r)]
    while True:
        new = decoded(stage.run(decode=(1,), steps=steps))[0]
        tokens += new
        if len(new) < steps:
            return tokens


@pytest.mark.parametrize("steps", [1, 4, 8])
@pytest.mark.parametrize("min_tokens", [0, 3, 9])
def test_stop_ids(runner: Runner, dense: Dense, min_tokens: int, steps: int) -> None:
    """The stop id counts as output; before `min_tokens` it is not even drawn."""
    free = dense.generate(greedy())
    stop_ids = (free[0], free[4])
    r = greedy(min_tokens=min_tokens, stop_ids=stop_ids)
    tokens = generate(Stage(runner), r, steps)
    assert tuple(tokens) == dense.generate(r)
    assert not {*tokens[:min_tokens]} & {*stop_ids} and len(tokens) >= min_tokens


def test_a_stop_id_that_had_to_come_early(runner: Runner, dense: Dense) -> None:
    """Nothing else was allowed: it comes, but ends nothing before `min_tokens`."""
    r = greedy(allowed_token_ids=(9,), stop_ids=(9,), min_tokens=5)
    assert tuple(generate(Stage(runner), r)) == dense.generate(r) == (9,) * 6


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9])
def test_max_total_len(runner: Runner, dense: Dense, max_tokens: int) -> None:
    r = greedy(max_tokens=max_tokens)
    assert tuple(generate(Stage(runner), r)) == dense.generate(r)[:max_tokens]


def test_max_len(runner: Runner, dense: Dense) -> None:
    """A row that fills its whole page table."""
    r = greedy(MAX_LEN - 5)
    tokens = generate(Stage(runner), r)
    assert tuple(tokens) == dense.generate(r) and len(tokens) == 5


def test_done_rows_write_nothing(runner: Runner, dense: Dense) -> None:
    """Not in decode steps nor beside chunks, until the row is set up again."""
    stage, r = Stage(runner), greedy(stop_ids=(dense.generate(greedy())[3],))
    generate(stage, r)
    stage.place(0, greedy(20))
    before = np.asarray(runner._pool)
    results = [stage.run(stage.chunk(0), decode=(1,))]
    results += [stage.run(decode=(1,), steps=8), stage.run(decode=(0, 1), steps=3)]
    assert [result.decode_counts.tolist() for result in results] == [[0], [0], [3, 0]]
    layers = runner.pool_spec.num_layers
    pages = np.concatenate([np.array(stage.pages[1]) + layer * runner.pool_spec.num_pages for layer in range(layers)])
    np.testing.assert_array_equal(np.asarray(runner._pool)[pages], before[pages])
    assert not np.isnan(before[pages]).all()  # the row did write its own
    for at in (2, 3):
        stage.prefill(at, greedy(20))
    stage.run(decode=(0, 2, 3, 1))
    assert runner._state is not None
    assert runner._state.done[-1], (
        "no padding here, but the done row's token went to the null row, which must not wake up"
    )


def test_a_row_is_used_again(runner: Runner, dense: Dense) -> None:
    """Nothing of the one before remains: penalties, bias, bad words, stop ids, doneness, pages."""
    busy = seeded(
        9, max_tokens=3, temperature=1.0, repetition_penalty=3.0, logit_bias={5: 3.0, 6: 3.0}, bad_words_ids=[(1,), (5, 6)],
        allowed_token_ids=tuple(range(50)), stop_ids=(2, 3, 4), min_tokens=2, top_k=4,
    )  # fmt: skip
    stage = Stage(runner)
    for r in (busy, greedy(), busy, greedy(20, frequency_penalty=0.8)):
        assert tuple(generate(stage, r)) == dense.generate(r)


def test_seeds_of_64_bits_and_children(runner: Runner, dense: Dense) -> None:
    for seed, child in ((2**64 - 1, 0), (2**63 + 5, 3)):
        r = seeded(seed=seed, child=child)
        assert tuple(generate(Stage(runner), r)) == dense.generate(r)


# --- pages and resuming ----------------------------------------------------------------------------------------------


def test_page_copies(runner: Runner, dense: Dense) -> None:
    """A fork starts from a copy of the page in which the prompt ends; the original goes on undisturbed."""
    prompt_len = 2 * PAGE + 5
    parent, child = greedy(prompt_len), row(prompt=TOKENS[:prompt_len], seed=9, child=1, max_tokens=20)
    stage = Stage(runner)
    first = stage.prefill(0, parent)
    stage.place(1, child)
    for index in range(3):
        stage.copy(1, stage.pages[0][index], stage.pages[1][index])
    result = stage.run(stage.chunk(1, prompt_len - 1), decode=(0,))
    ours, theirs = decoded(stage.run(decode=(0, 1), steps=8))
    assert (first, *decoded(result)[0], *ours) == dense.generate(parent)[:10]
    assert (*sampled(result), *theirs) == dense.generate(child)[:9]


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(repetition_penalty=1.7),
        dict(frequency_penalty=1.1, presence_penalty=0.6),
        dict(bad_words_ids=[(TOKENS[20], 7), (8,)], min_tokens=12, stop_ids=tuple(range(0, 98, 4))),
    ],
    ids=lambda f: ",".join(f) or "plain",
)
@pytest.mark.parametrize("make", [greedy, seeded])
def test_resumed_rows_go_on_as_if_nothing_happened(runner: Runner, dense: Dense, make, fields: dict) -> None:
    """After 6 tokens the row moves: its tokens are computed again in another row, with everything they count for."""
    r = make(**fields)
    expected = dense.generate(r)
    resumed = Row(**{**vars(r), "output": expected[:6]})
    stage = Stage(runner)
    tokens = [stage.prefill(3, resumed), *decoded(stage.run(decode=(3,), steps=8))[0]]
    assert tuple(tokens) == expected[6:15]


def test_reset(runner: Runner, dense: Dense) -> None:
    """Rows and pages of before are gone; the pool is zeros."""
    stage = Stage(runner)
    stage.prefill(0, greedy())
    runner.reset()
    assert not np.asarray(runner._pool).any() and np.asarray(runner._state.done).all()
    assert tuple(generate(Stage(runner), greedy())) == dense.generate(greedy())

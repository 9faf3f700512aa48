"""Text from the real engine: stop strings, streaming and bad words (behaviours 22-24, 27, 28)."""

import numpy as np
import pytest

from jaxkv.device.runner import Runner
from jaxkv.request import FinishReason, RequestOutput
from tests.device.dense import Dense
from tests.device.engine_stage import Ask, Bytes, Client, ask, make_tokenizer, only
from tests.device.stage import V

TEXT = tuple(np.random.default_rng(4).integers(3, V, 120).tolist())
TOKENIZER = make_tokenizer()
FREE = ask(TEXT[:12], temperature=1.0, seed=6, max_tokens=40, ignore_eos=True)


def text_of(tokens: tuple[int, ...]) -> str:
    return TOKENIZER.decode(tokens)


def stream(client: Client, what: Ask) -> tuple[str, RequestOutput]:
    """The joined pieces, and the output."""
    builder, pieces = client.submit(what, stream=True), []
    while builder.output is None:
        client.engine.step()
        pieces.append(builder.take_text())
    return "".join(pieces), builder.output


def both(runner: Runner, what: Ask, **config) -> RequestOutput:
    """The output, after checking that streaming gives the same (behaviour 28)."""
    outputs = []
    for overlap in (True, False):
        client = Client(runner, TOKENIZER, overlap=overlap, **config)
        outputs.append(client.generate(what)[0])
        pieces, streamed = stream(client, what)
        assert pieces == only(streamed).text
        outputs.append(streamed)
        client.check_idle()
    assert len({repr(output.outputs) for output in outputs}) == 1
    return outputs[0]


@pytest.mark.parametrize("seed", range(4))
def test_text_is_what_the_tokens_spell(runner: Runner, dense: Dense, seed: int) -> None:
    """Parts of characters included; pieces join to the text."""
    what = ask(TEXT[20:33], temperature=1.5, seed=seed, max_tokens=50)
    completion = only(both(runner, what))
    assert completion.token_ids == dense.generate(what.row())
    assert completion.text == text_of(completion.token_ids)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("decode_steps", [1, 8])
@pytest.mark.parametrize("where", [0, 3, 11, 25])
def test_stop_strings(runner: Runner, dense: Dense, where: int, decode_steps: int, include: bool) -> None:
    """Three characters over token borders; the tokens end with the one in which the stop string ends."""
    tokens = dense.generate(FREE.row())
    text = text_of(tokens)
    stop = text[where : where + 3]
    cut = text.index(stop)
    what = ask(FREE.prompt, temperature=1.0, seed=6, max_tokens=40, ignore_eos=True, stop=("never", stop),
               include_stop_str_in_output=include)  # fmt: skip
    completion = only(both(runner, what, decode_steps=decode_steps))
    assert completion.text == text[: cut + 3 * include]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert stop in text_of(completion.token_ids) and stop not in text_of(completion.token_ids[:-1])


def test_a_stop_string_in_the_step_that_ends_the_request(runner: Runner, dense: Dense) -> None:
    """All tokens up to max_tokens come at once: the stop string still wins over the length."""
    tokens = dense.generate(FREE.row())[:9]
    stop = text_of(tokens)[3:5]
    what = ask(FREE.prompt, temperature=1.0, seed=6, max_tokens=9, ignore_eos=True, stop=stop)
    completion = only(both(runner, what, decode_steps=8))
    assert completion.text == text_of(tokens).split(stop)[0] and completion.stop_reason == stop
    assert completion.finish_reason is FinishReason.STOP and len(completion.token_ids) < 9


def test_a_stop_string_that_never_comes(runner: Runner, dense: Dense) -> None:
    """What was held back for it comes out at the end."""
    tokens = dense.generate(FREE.row())
    text = text_of(tokens)
    what = ask(FREE.prompt, temperature=1.0, seed=6, max_tokens=40, ignore_eos=True, stop=text[-4:] + "#")
    completion = only(both(runner, what))
    assert (completion.text, completion.token_ids) == (text, tokens)
    assert completion.finish_reason is FinishReason.LENGTH and completion.stop_reason is None


def test_min_tokens_holds_stop_strings_off(runner: Runner, dense: Dense) -> None:
    stop = text_of(dense.generate(FREE.row()))[2]
    what = ask(FREE.prompt, temperature=1.0, seed=6, max_tokens=40, ignore_eos=True, stop=stop, min_tokens=10)
    completion = only(both(runner, what))
    assert len(completion.token_ids) > 10 or completion.finish_reason is FinishReason.LENGTH
    assert completion.text.startswith(text_of(completion.token_ids[:10]))


def test_stop_string_of_one_child_only(runner: Runner, dense: Dense) -> None:
    """The other completions go on."""
    free = ask(TEXT[:12], temperature=1.0, seed=6, max_tokens=30, ignore_eos=True, n=3)
    texts = [text_of(dense.generate(free.row(child))) for child in range(3)]
    stop = next(texts[1][i : i + 3] for i in range(5, 25) if not any(texts[1][i : i + 3] in texts[c] for c in (0, 2)))
    client = Client(runner, TOKENIZER)
    what = ask(free.prompt, temperature=1.0, seed=6, max_tokens=30, ignore_eos=True, n=3, stop=stop)
    output = client.generate(what)[0]
    assert [completion.stop_reason for completion in output.outputs] == [None, stop, None]
    assert [completion.text for completion in output.outputs] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    client.check_idle()


@pytest.mark.parametrize("greedy", [True, False])
def test_bad_words(runner: Runner, dense: Dense, greedy: bool) -> None:
    """Words that came without the field do not come with it, also across steps in flight (behaviour 19)."""
    fields = dict(temperature=0.0 if greedy else 1.0, seed=6, max_tokens=40, ignore_eos=True)
    tokens = tuple(t for t in dense.generate(ask(TEXT[:12], **fields).row()) if 3 <= t < 80)
    words = (text_of(tokens[:1]), text_of(tokens[2:4]), text_of(tokens[5:8]))
    what = ask(TEXT[:12], **fields, bad_words=words)
    completion = only(both(runner, what))
    ids = tuple(dict.fromkeys(ids for word in words for ids in TOKENIZER.encode_bad_word(word)))
    assert completion.token_ids == dense.generate(what.row(bad_words_ids=ids))
    for word in ids:
        found = [completion.token_ids[i : i + len(word)] for i in range(40)]
        assert word not in found


def test_words_without_tokens_do_not_switch_the_others_off(runner: Runner) -> None:
    """A tokenizer may spell a word with no token at all (a character that it drops)."""

    class Dropping(Bytes):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.replace("\u200b", ""))

    plain = only(Client(runner, TOKENIZER).generate(ask(TEXT[:12], max_tokens=8))[0])
    first = next(t for t in plain.token_ids if 3 <= t < 80)
    client = Client(runner, make_tokenizer(Dropping()))
    output = client.generate(ask(TEXT[:12], max_tokens=8, bad_words=("\u200b", text_of((first,)))))[0]
    assert first not in only(output).token_ids

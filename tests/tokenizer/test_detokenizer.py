"""Pieces join to the offline text, characters come whole, and the work per token is constant."""

import itertools

import hypothesis
import pytest
import sentencepiece
from hypothesis import strategies as st

from jaxkv.detokenizer import Detokenizer
from jaxkv.tokenizer import Tokenizer
from jaxkv.tokenizer.hf import HfVocabulary
from tests.tokenizer import tiny

each_kind = pytest.mark.parametrize("kind", tiny.KINDS)
kinds = st.sampled_from(tiny.KINDS)
thorough = hypothesis.settings(max_examples=300, deadline=None)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


@thorough
@hypothesis.given(kinds, st.data(), st.booleans(), st.integers(1, 4))
def test_any_ids_stream_to_the_offline_text(kind: str, data: st.DataObject, skip: bool, size: int) -> None:
    tokenizer = tiny.load(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    assert "".join(stream(tokenizer, ids, skip=skip, size=size)) == tokenizer.decode(ids, skip_special_tokens=skip)


@thorough
@hypothesis.given(kinds, st.text(max_size=30) | st.sampled_from(tiny.TEXTS))
def test_text_comes_without_replacement_characters(kind: str, text: str) -> None:
    hypothesis.assume("\ufffd" not in text)
    tokenizer = tiny.load(kind)
    ids = tokenizer.encode(text, add_bos=False)
    offline = tokenizer.decode(ids, skip_special_tokens=False)
    seen = ""
    for piece in stream(tokenizer, ids, skip=False):
        seen += piece
        assert "\ufffd" not in piece
        assert offline.startswith(seen)
    assert seen == offline


@pytest.mark.parametrize("kind", ["byte_level", "gguf_gpt2", "llama2", "sentencepiece_inner", "gguf_llama"])
@pytest.mark.parametrize("text", [text for text in tiny.TEXTS if "<|" not in text and "▁" not in text])
def test_text_comes_back_exactly(kind: str, text: str) -> None:
    tokenizer = tiny.load(kind)
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text


@each_kind
def test_character_waits_for_its_last_byte(kind: str) -> None:
    tokenizer = tiny.load(kind)
    *before, last, flushed = stream(tokenizer, tokenizer.encode("fox 🙂", add_bos=False))
    assert "".join(before) == "fox "
    assert (last, flushed) == ("🙂", "")


@each_kind
def test_cut_character_is_replaced_at_the_end_only(kind: str) -> None:
    tokenizer = tiny.load(kind)
    ids = tokenizer.encode("fox 🙂", add_bos=False)[:-1]
    *pieces, flushed = stream(tokenizer, ids)
    assert "".join(pieces) == "fox "
    # As many U+FFFD as the format's own decoder writes: one a byte, or one a character.
    assert flushed == ("\ufffd" if kind in ("byte_level", "gguf_gpt2") else "\ufffd" * 3)
    assert tokenizer.decode(ids) == "fox " + flushed


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "sentencepiece", "unigram", "gguf_llama"])
def test_leading_space_goes_once(kind: str) -> None:
    tokenizer = tiny.load(kind)
    ids = tokenizer.encode("the dog", add_bos=False)
    assert "".join(stream(tokenizer, ids + ids)) == tokenizer.decode(ids + ids) == "the dog the dog"
    specials = sorted(tokenizer.special_ids)
    assert "".join(stream(tokenizer, specials + ids)) == "the dog"


@each_kind
def test_continuing_keeps_the_leading_space(kind: str) -> None:
    tokenizer = tiny.load(kind)
    ids = tokenizer.encode("x the dog", add_bos=False)
    space = next(n for n in range(1, len(ids)) if tokenizer.token_bytes(ids[n]).startswith(b" "))
    assert Detokenizer(tokenizer, continues=True).feed(ids[space:]) == " the dog"


@each_kind
def test_special_tokens_are_skipped_or_shown(kind: str) -> None:
    tokenizer = tiny.load(kind)
    fox = tokenizer.encode("fox", add_bos=False)
    ids = [*fox, *sorted(tokenizer.eos_ids), *fox]
    assert "</s>" not in "".join(stream(tokenizer, ids))
    assert "</s>" in "".join(stream(tokenizer, ids, skip=False))


@each_kind
def test_each_token_is_looked_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny.load(kind)
    looked_at: list[int] = []
    token_bytes = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda i: looked_at.append(i) or token_bytes(i))
    monkeypatch.setattr(tokenizer, "decode", None)
    ids = tokenizer.encode("the quick brown fox 🙂 " * 50, add_bos=False)
    stream(tokenizer, ids)
    assert looked_at == ids


@thorough
@hypothesis.given(st.sampled_from(["byte_level", "llama2", "metaspace"]), st.data(), st.booleans())
def test_decode_is_that_of_tokenizers(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tiny.load(kind)
    assert isinstance(tokenizer.vocabulary, HfVocabulary)
    any_id = st.integers(0, tokenizer.vocab_size - 1).map(lambda token_id: [token_id])
    some_text = st.text(max_size=3).map(lambda text: tokenizer.encode(text, add_bos=False))
    ids = list(itertools.chain(*data.draw(st.lists(any_id | some_text, max_size=15))))
    hypothesis.assume(kind == "byte_level" or not _mixes_good_and_bad_bytes(tokenizer, ids, skip))
    expected = tokenizer.vocabulary.backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def _mixes_good_and_bad_bytes(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether a run of byte tokens has characters and wrong bytes: `tokenizers` replaces both, jaxkv the latter."""
    kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    first_byte = tokenizer.vocabulary.token_id("<0x00>")
    assert first_byte is not None
    for is_byte, run in itertools.groupby(kept, lambda i: first_byte <= i < first_byte + 256):
        data = b"".join(tokenizer.token_bytes(i) for i in run)
        if is_byte and set(data.decode("utf-8", "replace")) > {"\ufffd"}:
            return True
    return False


@thorough
@hypothesis.given(st.sampled_from(["sentencepiece", "unigram"]), st.data())
def test_decode_is_that_of_sentencepiece(kind: str, data: st.DataObject) -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=tiny.sentencepiece_proto(kind))
    ids = data.draw(st.lists(st.integers(3, model.get_piece_size() - 1), max_size=20))
    assert tiny.load(kind).decode(ids) == model.decode(ids)

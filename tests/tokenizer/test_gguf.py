"""The header reader against the gguf package, and refusals of what a GGUF file cannot mean."""

from pathlib import Path
from typing import Any

import gguf
import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jaxkv.errors import CheckpointError
from jaxkv.gguf_metadata import read_gguf_metadata
from jaxkv.tokenizer import load_tokenizer
from jaxkv.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from tests.tokenizer import tiny


def test_header_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    metadata = _write_gguf(path)
    assert read_gguf_metadata(path) == metadata
    by_path, by_reader = load_tokenizer(path), load_tokenizer(gguf.GGUFReader(path))
    assert by_path.encode("The dog 🙂") == by_reader.encode("The dog 🙂") == tiny.load("gguf_gpt2").encode("The dog 🙂")


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    _write_gguf(whole)
    data = whole.read_bytes()
    header_end = data.index(b"tokenizer.chat_template")
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 20, *range(24, header_end, 997)]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_tokenizer(cut)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "bert", "'bert' is not supported"),
        ("tokenizer.ggml.pre", "klingon", r"tokenizer\.ggml\.pre='klingon' is not supported"),
        ("tokenizer.ggml.merges", ["no such"], "merges"),
    ],
)
def test_what_is_unknown_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer({**tiny.gguf_gpt2(), key: value})


def test_lists_of_different_lengths_are_refused() -> None:
    for metadata in (tiny.gguf_gpt2(), tiny.gguf_llama()):
        with pytest.raises(CheckpointError, match="token_type has 3 entries"):
            load_tokenizer({**metadata, "tokenizer.ggml.token_type": [1, 1, 1]})


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_missing_keys_are_named(key: str) -> None:
    metadata = tiny.gguf_gpt2()
    del metadata[key]
    with pytest.raises(CheckpointError, match=key):
        load_tokenizer(metadata)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.text(max_size=40) | st.sampled_from(tiny.TEXTS))
def test_word_rules_are_those_of_tokenizers(text: str) -> None:
    """The library's own GPT-2 and digit steps cut where our expressions do."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    for name, expected in (("gpt-2", byte_level), ("smollm", digits)):
        ours = pre_tokenizers.Sequence(list(PRE_TOKENIZERS[name].build()))
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def _write_gguf(path: Path) -> dict[str, Any]:
    """Writes the byte-level tokenizer with the gguf package; returns the header as it should be read."""
    metadata = tiny.gguf_gpt2()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_int64("some.negative", -5)
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(metadata["tokenizer.chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    extra = {"general.architecture": "llama", "llama.rope.freq_base": 10000.0, "some.negative": -5}
    return {**extra, **metadata}

"""Ids equal those of the libraries and of transformers; special tokens, BOS and end ids follow the model's files."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from jaxkv.errors import CheckpointError, RequestError
from jaxkv.tokenizer import load_tokenizer, save_tokenizer
from jaxkv.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZERS
from tests.tokenizer import tiny

each_kind = pytest.mark.parametrize("kind", tiny.KINDS)
thorough = hypothesis.settings(max_examples=200, deadline=None)
# Ids that transformers 5.24 gives with SmolLM2's published tokenizer.
SMOLLM2_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Water boils at 100 degrees": [12615, 36411, 418, 216, 33, 32, 32, 5027],
    "def fibonacci(n):\n": [1604, 3987, 46477, 24, 94, 727, 198],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
}


def folder_with(tmp_path: Path, kind: str, **config: Any) -> Path:
    """A tiny model's folder whose tokenizer_config.json also says `config`."""
    path = tiny.write(kind, tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return tmp_path


class TestEncode:
    @pytest.mark.parametrize("text", SMOLLM2_IDS)
    def test_smollm2(self, smollm2_gguf_path: Path, text: str) -> None:
        tokenizer = load_tokenizer(smollm2_gguf_path)
        assert tokenizer.encode(text) == SMOLLM2_IDS[text]
        assert tokenizer.decode(SMOLLM2_IDS[text], skip_special_tokens=False) == text

    @thorough
    @hypothesis.given(st.text(max_size=30) | st.sampled_from(tiny.TEXTS))
    def test_gguf_metadata_makes_the_tokenizer_it_came_from(self, text: str) -> None:
        assert tiny.load("gguf_gpt2").encode(text) == tiny.load("byte_level").encode(text)
        # The sentencepiece folder knows two chat tokens that its GGUF twin does not.
        hypothesis.assume("<|im" not in text)
        assert tiny.load("gguf_llama").encode(text) == tiny.load("sentencepiece").encode(text)

    @each_kind
    def test_special_tokens_in_the_text_become_ids(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        bos, eos = tokenizer.bos_id, tokenizer.vocabulary.token_id("</s>")
        ids = tokenizer.encode("<s>The dog</s>", add_bos=False)
        assert (ids[0], ids[-1]) == (bos, eos)
        assert tokenizer.decode(ids) == "The dog"
        assert {bos, eos} <= tokenizer.special_ids

    @pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gguf_gpt2", "gguf_llama"])
    def test_added_tokens_that_are_not_special_stay_whole_and_visible(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        think = tokenizer.vocabulary.token_id("<think>")
        ids = tokenizer.encode("a<think>b")
        assert think in ids
        assert tokenizer.decode(ids) == "a<think>b"

    def test_space_after_special_tokens(self) -> None:
        """With `legacy` (the default) each stretch of text starts with a space, without it only the first."""
        text = "<|im_end|>dog"
        legacy, inner = (
            tiny.load(kind).encode(text, add_bos=False) for kind in ("sentencepiece", "sentencepiece_inner")
        )
        assert tiny.load("sentencepiece").token_bytes(legacy[1]).startswith(b" ")
        assert not tiny.load("sentencepiece_inner").token_bytes(inner[1]).startswith(b" ")

    def test_spaces_around_added_tokens_can_belong_to_them(self, tmp_path: Path) -> None:
        entry = {"content": "<|end|>", "special": True, "lstrip": True, "rstrip": True}
        tokenizer = load_tokenizer(folder_with(tmp_path, "sentencepiece", added_tokens_decoder={"900": entry}))
        assert tokenizer.vocab_size == 901
        spaced, tight = (tokenizer.encode(text, add_bos=False) for text in ("a  <|end|> \n b", "a<|end|>b"))
        assert spaced == tight
        assert 900 in tight

    def test_limits_in_the_file_do_not_cut_or_pad(self) -> None:
        assert len(tiny.load("llama2").encode("The quick brown fox jumps over the lazy dog", add_bos=False)) > 8
        assert len(tiny.load("llama2").encode("a", add_bos=False)) < 4

    @each_kind
    def test_text_that_is_no_unicode_is_refused(self, kind: str) -> None:
        with pytest.raises(RequestError, match="lone surrogate"):
            tiny.load(kind).encode("a\ud800b")


class TestBos:
    @pytest.mark.parametrize(
        ("kind", "add_bos"),
        [("byte_level", False), ("llama2", True), ("sentencepiece", True), ("gguf_gpt2", False), ("gguf_llama", True)],
    )
    def test_default_is_the_models(self, kind: str, add_bos: bool) -> None:
        tokenizer = tiny.load(kind)
        bare = tokenizer.encode("The dog", add_bos=False)
        assert tokenizer.add_bos is add_bos
        assert tokenizer.encode("The dog") == ([tokenizer.bos_id, *bare] if add_bos else bare)
        assert tokenizer.encode("The dog", add_bos=True) == [tokenizer.bos_id, *bare]

    @each_kind
    def test_there_is_never_a_second_one(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        assert tokenizer.encode("<s>The dog", add_bos=True).count(1) == 1
        assert tokenizer.encode("<s>The dog").count(1) == 1

    def test_config_overrides_the_post_processor(self, tmp_path: Path) -> None:
        assert not load_tokenizer(folder_with(tmp_path, "llama2", add_bos_token=False)).add_bos
        assert load_tokenizer(folder_with(tmp_path, "byte_level", add_bos_token=True)).add_bos

    def test_gguf_flag(self) -> None:
        assert load_tokenizer({**tiny.gguf_gpt2(), "tokenizer.ggml.add_bos_token": True}).add_bos
        assert not load_tokenizer({**tiny.gguf_llama(), "tokenizer.ggml.add_bos_token": False}).add_bos
        assert load_tokenizer({**tiny.gguf_gpt2(), "tokenizer.ggml.pre": "llama-bpe"}).add_bos

    def test_asking_for_one_that_does_not_exist(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(folder_with(tmp_path, "byte_level", bos_token=None))
        with pytest.raises(RequestError, match="no BOS"):
            tokenizer.encode("x", add_bos=True)


class TestEndIds:
    def test_union_of_tokenizer_generation_config_and_template(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path, "byte_level")
        end_of_turn = tiny.SPECIAL.index("<|im_end|>")
        assert load_tokenizer(folder).eos_ids == {2, end_of_turn}
        assert load_tokenizer(folder, generation_config={"eos_token_id": [7, 9]}).eos_ids == {2, end_of_turn, 7, 9}
        (folder / "config.json").write_text(json.dumps({"eos_token_id": 11}))
        assert load_tokenizer(folder).eos_ids == {2, end_of_turn, 11}
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [12, 13]}))
        assert load_tokenizer(folder).eos_ids == {2, end_of_turn, 12, 13}

    def test_template_without_end_of_turn(self, tmp_path: Path) -> None:
        plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        assert load_tokenizer(folder_with(tmp_path, "byte_level", chat_template=plain)).eos_ids == {2}

    def test_gguf_end_of_turn_and_message(self) -> None:
        metadata = {**tiny.gguf_llama(), "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
        assert load_tokenizer(metadata).eos_ids == {2, 7, 8}

    def test_smollm2(self, smollm2_gguf_path: Path) -> None:
        tokenizer = load_tokenizer(smollm2_gguf_path)
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, {2})
        assert not tokenizer.add_bos


class TestTokens:
    @each_kind
    def test_bytes_of_tokens_join_to_the_text(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        ids = tokenizer.encode("The café 🙂", add_bos=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).lstrip(b" ") == "The café 🙂".encode()

    @each_kind
    def test_display_text(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        assert tokenizer.token_text(2) == "</s>"
        assert tokenizer.token_text(tokenizer.encode("🙂", add_bos=False)[-1]) == "\ufffd"

    @each_kind
    def test_ids_without_token_are_empty(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        assert tokenizer.token_bytes(tokenizer.vocab_size + 10) == tokenizer.token_bytes(-1) == b""
        assert tokenizer.decode([tokenizer.vocab_size + 10]) == ""

    @each_kind
    def test_bad_words_with_and_without_space(self, kind: str) -> None:
        tokenizer = tiny.load(kind)
        sequences = tokenizer.encode_bad_word(" dog")
        assert 1 <= len(sequences) <= 2
        texts = {b"".join(map(tokenizer.token_bytes, ids)) for ids in sequences}
        assert texts <= {b"dog", b" dog", b"  dog"}
        # What the model would write after other text is among them.
        within = tuple(tokenizer.encode("the dog", add_bos=False))
        assert any(within[-len(ids) :] == ids for ids in sequences)


class TestFiles:
    def test_sentencepiece_model_alone(self, tmp_path: Path) -> None:
        tiny.write("sentencepiece", tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, {2}, True)
        assert tokenizer.special.texts == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def test_older_added_tokens_file(self, tmp_path: Path) -> None:
        folder_with(tmp_path, "sentencepiece", eos_token="<|end|>", added_tokens_decoder=None)
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": 700, "<|note|>": 701}))
        tokenizer = load_tokenizer(tmp_path)
        ids = tokenizer.encode("a<|note|>b<|end|>")
        assert tokenizer.eos_ids == {700}
        assert {700, 701} <= set(ids)
        assert tokenizer.decode(ids) == "a<|note|> b"

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.model"):
            load_tokenizer(tmp_path)
        with pytest.raises(CheckpointError, match=r"no\.gguf: cannot be read"):
            load_tokenizer(tmp_path / "no.gguf")

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
    def test_damaged_files_are_named(self, tmp_path: Path, name: str) -> None:
        folder = tiny.write("sentencepiece" if name == "tokenizer.model" else "byte_level", tmp_path)
        (folder / name).write_bytes(b'{"garbage')
        with pytest.raises(CheckpointError, match=name):
            load_tokenizer(folder)

    def test_decoder_without_per_token_meaning_is_refused(self, tmp_path: Path) -> None:
        path = tiny.write("byte_level", tmp_path) / "tokenizer.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
        with pytest.raises(CheckpointError, match="WordPiece"):
            load_tokenizer(tmp_path)

    def test_files_that_disagree_are_refused(self, tmp_path: Path) -> None:
        entry = {"400000": {"content": "<|new|>", "special": True}}
        with pytest.raises(CheckpointError, match=r"<\|new\|>.*400000"):
            load_tokenizer(folder_with(tmp_path, "byte_level", added_tokens_decoder=entry))

    def test_tokens_only_the_config_knows_are_added(self, tmp_path: Path) -> None:
        size = tiny.load("byte_level").vocab_size
        entry = {str(size): {"content": "<|new|>", "special": True}}
        tokenizer = load_tokenizer(folder_with(tmp_path, "byte_level", added_tokens_decoder=entry))
        assert tokenizer.encode("a<|new|>")[-1] == size
        assert size in tokenizer.special_ids

    @each_kind
    def test_saved_tokenizers_come_back(self, kind: str, tmp_path: Path) -> None:
        tokenizer = tiny.load(kind)
        save_tokenizer(tokenizer, tmp_path)
        again = load_tokenizer(tmp_path)
        for text in tiny.TEXTS:
            assert again.encode(text) == tokenizer.encode(text)
            ids = tokenizer.encode(text)
            assert again.decode(ids) == tokenizer.decode(ids)
        for name in ("vocab_size", "bos_id", "eos_ids", "special_ids", "add_bos"):
            assert getattr(again, name) == getattr(tokenizer, name)
        if tokenizer.chat_template:
            message = {"role": "user", "content": "hi"}
            assert again.encode_chat([message]) == tokenizer.encode_chat([message])


@pytest.mark.parity
class TestTransformers:
    @pytest.mark.parametrize("kind", ["byte_level", "llama2", "metaspace"])
    def test_folder(self, kind: str, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tiny.write(kind, tmp_path))
        ours = load_tokenizer(tmp_path)
        for text in [*tiny.TEXTS, *tiny.LINES]:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.encode(text, add_bos=False) == theirs.encode(text, add_special_tokens=False)
            ids = theirs.encode(text)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)

    def test_word_rules(self) -> None:
        mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
        shared = mapping.GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys()
        assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"} <= shared
        for name in sorted(shared):
            theirs = pre_tokenizers.Split(tokenizers.Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
            (split,) = PRE_TOKENIZERS[name].splits
            ours = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
            for text in [
                *tiny.TEXTS,
                *tiny.LINES,
                "I'LL don't HTTPServer x1234567",
                "e\u0301 \u0939\u093f\u0928\u094d",
            ]:
                assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), name

    def test_smollm2(self, smollm2_gguf_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        path = smollm2_gguf_path
        theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        # transformers gives the "smollm" vocabulary GPT-2's word rule; its published tokenizer.json also cuts digits.
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        published = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        theirs.backend_tokenizer.pre_tokenizer = published
        ours = load_tokenizer(path)
        for text in [*tiny.TEXTS, *tiny.LINES, "12345 ½ ²", *SMOLLM2_IDS]:
            ids = theirs.encode(text)
            assert ours.encode(text) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
        assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]

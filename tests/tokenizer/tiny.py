"""Builds tiny tokenizers of every kind jaxkv reads, as the files of a model folder or as GGUF metadata."""

import functools
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxkv.tokenizer import Tokenizer, load_tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps.",
    "Once upon a time, there was a little girl who lived in a little house.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "Café naïve, déjà vu. Zürich, 12345 and 67890.",
    "日本語のテキスト と 漢字",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = (
    "byte_level",  # tokenizer.json as GPT-2, SmolLM2, Llama 3
    "llama2",  # tokenizer.json as Llama 2: "▁" words, byte fallback
    "metaspace",  # the same with the newer Metaspace step
    "sentencepiece",  # tokenizer.model, BPE
    "sentencepiece_inner",  # the same without a space after special tokens (legacy: false)
    "unigram",  # tokenizer.model, normalising and trimming spaces
    "gguf_gpt2",
    "gguf_llama",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Texts with everything that is hard: characters over several tokens, characters no token has, spaces, special tokens.
TEXTS = [
    "The quick brown fox",
    " leading and  double spaces, trailing  ",
    "emoji 🙂👨‍👩‍👧 and አማርኛ, 漢字 café",
    "<|im_start|>user\nhi there<|im_end|>\n",
    "tabs\tand\r\nnewlines\n\n\n  end",
    "a▁b ▁ c",
    "",
    "🙂",
    " ",
]


def write(kind: str, folder: Path) -> Path:
    """Writes a model folder's tokenizer files."""
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHATML}
    if kind in _BACKENDS:
        backend(kind).save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.model").write_bytes(sentencepiece_proto(kind))
        added = {str(SPECIAL.index(text) + 1000): {"content": text, "special": True} for text in SPECIAL[3:]}
        config |= {"added_tokens_decoder": added, "legacy": kind != "sentencepiece_inner"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def load(kind: str) -> Tokenizer:
    if kind in _GGUF:
        return load_tokenizer(_GGUF[kind]())
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write(kind, Path(folder)))


def backend(kind: str) -> tokenizers.Tokenizer:
    return _BACKENDS[kind]()


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens(["<think>"])  # added but not special
    return backend


def _byte_fallback_bpe() -> models.BPE:
    """A BPE model over "▁" words whose vocabulary has the 256 byte tokens."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    trained = json.loads(backend.to_str())["model"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [token for token, _ in sorted(trained["vocab"].items(), key=lambda item: item[1]) if token not in names]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(merge) for merge in trained["merges"]]
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _llama2() -> tokenizers.Tokenizer:
    """Laid out as Llama 2's tokenizer.json; starts prompts with the BOS."""
    backend = tokenizers.Tokenizer(_byte_fallback_bpe())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)  # limits of a training run, as many files carry them
    backend.enable_padding(length=8)
    return backend


def _metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_byte_fallback_bpe())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return backend


@functools.cache
def sentencepiece_proto(kind: str) -> bytes:
    model = io.BytesIO()
    unigram = kind == "unigram"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="unigram" if unigram else "bpe",
        vocab_size=440,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc" if unigram else "identity",
        remove_extra_whitespaces=unigram,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return model.getvalue()


def gguf_gpt2() -> dict[str, Any]:
    """GGUF metadata of the byte-level tokenizer."""
    made = _byte_level()
    model = json.loads(made.to_str())["model"]
    vocab = {**model["vocab"], **{t.content: i for i, t in made.get_added_tokens_decoder().items()}}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [2 if t == "<unk>" else 3 if t in SPECIAL else 4 if t == "<think>" else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def gguf_llama() -> dict[str, Any]:
    """GGUF metadata of the sentencepiece model."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_proto("sentencepiece"))
    ids = range(model.get_piece_size())

    def kind(i: int) -> int:
        checks = (model.is_unknown, model.is_control, model.is_byte)
        known = next((number for number, check in zip((2, 3, 6), checks, strict=True) if check(i)), 1)
        return 4 if model.id_to_piece(i) == "<think>" else known

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


_BACKENDS = {"byte_level": _byte_level, "llama2": _llama2, "metaspace": _metaspace}
_GGUF = {"gguf_gpt2": gguf_gpt2, "gguf_llama": gguf_llama}

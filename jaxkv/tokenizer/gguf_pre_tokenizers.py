"""How text is cut into words before byte-pair merging, by the name a GGUF file gives it (`tokenizer.ggml.pre`).

GGUF carries the name only; the rule is part of each published tokenizer.json. A wrong rule gives wrong ids that look
almost right, so names that are not here are refused.
"""

import dataclasses
from collections.abc import Iterator

import tokenizers
from tokenizers import pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions applied one after the other; each match is a word."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    add_bos: bool = False  # what llama.cpp does for files without `tokenizer.ggml.add_bos_token`

    def build(self) -> Iterator[pre_tokenizers.PreTokenizer]:
        for pattern in self.splits:
            yield pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


_RULES = {
    "default gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer((_LLAMA3,), True, True),
    "dbrx smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names.split()}

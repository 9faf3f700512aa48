"""What the tokens of a model spell, as grammars need it: distinct byte strings in order, and which ids have each."""

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.grammar.trie import Trie, build_trie

if TYPE_CHECKING:
    from jaxkv.tokenizer.base import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class TokenVocabulary:
    """The tokens a grammar may use. Build it with `make_vocabulary` or `vocabulary_of`.

    Tokens with the same bytes share a rank: a grammar cannot tell them apart.

    Attributes:
        size: V, ids of the model's logits; those past the tokenizer's own have no bytes.
        strings: the distinct spellings, sorted; their places are called ranks.
        rank_of: int32 [V], rank of each id, -1 for ids that grammars never allow: special tokens, tokens without bytes.
        end_ids: ids that end an output, sorted; never allowed but where the text is complete.
        encode: text to ids as the model's tokenizer does in the middle of a text; None where it is not known.
        templates: what `loops` worked out for this vocabulary, shared by all grammars.
    """

    size: int
    strings: tuple[bytes, ...]
    rank_of: np.ndarray
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]] | None = None
    templates: dict[bytes, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def trie(self) -> Trie:
        return build_trie(self.strings)

    @functools.cached_property
    def ranked_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 sorted by rank, start int64 [ranks + 1] of each rank's ids)."""
        ids = np.argsort(self.rank_of, kind="stable")[np.count_nonzero(self.rank_of < 0) :]
        counts = np.bincount(self.rank_of[ids], minlength=len(self.strings))
        return ids.astype(np.int32), np.concatenate(([0], np.cumsum(counts)))

    @functools.cached_property
    def digest(self) -> bytes:
        """Equal for equal vocabularies: the key of what is cached about them."""
        parts = hashlib.sha256(repr((self.size, self.end_ids)).encode())
        parts.update(self.rank_of.tobytes())
        for string in self.strings:
            parts.update(len(string).to_bytes(4, "little") + string)
        return parts.digest()

    def only(self, usable: np.ndarray) -> "TokenVocabulary":
        """The vocabulary that has lost all tokens but `usable` bool [V]; how the tokenizer writes a text is void then."""
        is_text = self.rank_of >= 0
        if usable[is_text].all():
            return self
        left = np.where(is_text & usable, self.rank_of, -1)
        ranks = np.unique(left[left >= 0])
        return TokenVocabulary(
            size=self.size,
            strings=tuple(self.strings[rank] for rank in ranks),
            rank_of=np.where(left < 0, -1, np.searchsorted(ranks, left)).astype(np.int32),
            end_ids=self.end_ids,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; empty if grammars never allow it."""
        rank = int(self.rank_of[token_id])
        return self.strings[rank] if rank >= 0 else b""


def make_vocabulary(
    tokens: Sequence[bytes],
    *,
    size: int,
    excluded: Collection[int] = (),
    end_ids: Collection[int] = (),
    encode: Callable[[str], list[int]] | None = None,
) -> TokenVocabulary:
    """Builds the vocabulary.

    Args:
        tokens: the bytes of each id, empty for ids that have none.
        size: V, width of the model's logits, at least `len(tokens)`; ids past `tokens` have no bytes.
        excluded: ids that no grammar may use whatever their bytes, such as special tokens.
        end_ids: ids that end an output; excluded too.
        encode: text to ids in the middle of a text.
    """
    assert size >= len(tokens), f"{len(tokens)} tokens do not fit logits of width {size}"
    barred = {*excluded, *end_ids}
    usable = {i: token for i, token in enumerate(tokens) if token and i not in barred}
    strings = sorted(set(usable.values()))
    place = {string: rank for rank, string in enumerate(strings)}
    rank_of = np.full(size, -1, np.int32)
    rank_of[list(usable)] = [place[token] for token in usable.values()]
    ends = tuple(sorted(end for end in set(end_ids) if end < size))
    return TokenVocabulary(size=size, strings=tuple(strings), rank_of=rank_of, end_ids=ends, encode=encode)


_known: "weakref.WeakKeyDictionary[Tokenizer, dict[int, TokenVocabulary]]" = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: "Tokenizer", size: int) -> TokenVocabulary:
    """The vocabulary of a tokenizer for logits of width `size`; built once (about a second for 262 k tokens).

    An output goes on from its prompt, so a token that starts it keeps its leading space (sentencepiece's "▁").
    """
    by_size = _known.setdefault(tokenizer, {})
    if size not in by_size:
        by_size[size] = make_vocabulary(
            [tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, size))],
            size=size,
            excluded=tokenizer.special_ids,
            end_ids=tokenizer.eos_ids,
            encode=_middle_encoder(weakref.ref(tokenizer)),
        )
    return by_size[size]


def _middle_encoder(tokenizer: "weakref.ref[Tokenizer]") -> Callable[[str], list[int]]:
    """`encode` for text that goes on from other text: without the space that sentencepiece puts at the start."""

    @functools.cache
    def anchor() -> str:
        """Text that keeps that space away from what follows: a line break, which no token joins to a `▁` before it."""
        owner = tokenizer()
        assert owner is not None
        first = owner.vocabulary.encode("a")[:1]
        starts_with_space = bool(first) and owner.vocabulary.token_bytes(first[0]).startswith(b" ")
        return "\n" if starts_with_space else ""

    def encode(text: str) -> list[int]:
        owner = tokenizer()
        assert owner is not None, "the tokenizer of this vocabulary is gone"
        before = owner.vocabulary.encode(anchor()) if anchor() else []
        ids = owner.vocabulary.encode(anchor() + text)
        return ids[len(before) :] if ids[: len(before)] == before else []

    return encode

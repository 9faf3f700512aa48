"""Where two texts, or two lists of tokens, part; and where in a text a token begins."""

from collections.abc import Sequence

from jaxkv.tokenizer import Tokenizer
from jaxkv.tokenizer.base import TokenBytes

# A text cut in the middle of a word may be encoded otherwise over its last few characters.
SLACK = 32


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common beginning, by halving: slices compare at the speed of memory."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str, limit: int) -> int:
    """Length of the longest common end, at most `limit`."""
    a, b = (text[max(len(text) - limit, 0) :] for text in (a, b))
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle :] == b[len(b) - middle :]:
            low = middle
        else:
            high = middle - 1
    return low


def token_start(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], index: int) -> int:
    """The character of `text` at which its token `index` begins.

    The tokens before it are turned back into text. Where that does not spell the text (sentencepiece normalises and
    moves spaces), the shortest beginning of the text that makes these tokens is searched for.

    Args:
        tokenizer: of the model.
        text: what was encoded.
        token_ids: its tokens, without a BOS that the text does not spell.
        index: at most `len(token_ids)`.
    """
    data, encoded = TokenBytes(tokenizer, skip_special_tokens=False).feed(token_ids[:index]), text.encode()
    if encoded.startswith(data):
        return len(data.decode("utf-8", "ignore"))
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if common_prefix(tokenizer.vocabulary.encode(text[:middle]), token_ids[:index]) == index:
            high = middle
        else:
            low = middle + 1
    return low


def parting(a: str, b: str, start_a: int, start_b: int) -> tuple[int, int]:
    """The character at which two texts part, in each.

    Args:
        a: a text.
        b: another one.
        start_a: where its first token that differs begins.
        start_b: the same in `b`.
    """
    index = common_prefix(a, b)
    if index >= min(start_a, start_b) - SLACK:
        return index, index
    # What differs before these tokens makes no difference to the model (a normalising tokenizer).
    same = common_prefix(a[start_a:], b[start_b:])
    return start_a + same, start_b + same

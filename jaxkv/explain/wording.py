"""What kind of change lies between two texts: spaces, code points, the order of keys or lines, a time, an id, a number."""

import json
import re
import unicodedata
from typing import Any

from jaxkv.explain.cause import Cause
from jaxkv.explain.volatile import name_volatile
from jaxkv.plain_json import unordered

_MAX_BRACKETS = 64  # JSON around a difference: so many nested values are tried
_OPEN, _CLOSE = "[{", "]}"
_TYPOGRAPHY = str.maketrans("\u2018\u2019\u201c\u201d\u2010\u2011\u2013\u2014", "''\"\"----")  # quotes and dashes
_SEPARATORS = re.compile("[,;|]")


def compare_texts(a: str, b: str, at_a: int, at_b: int, part_a: str, part_b: str) -> tuple[Cause, str] | None:
    """Names a change by what the texts look like; None if it is a change of words.

    Args:
        a: a prompt.
        b: the other one.
        at_a: the first character that differs in `a`.
        at_b: the same in `b`.
        part_a: the message in which the difference lies, or all of `a`.
        part_b: the same of `b`.
    """
    if _without_spaces(part_a) == _without_spaces(part_b):
        return Cause.WHITESPACE, f"{_char(a, at_a)} / {_char(b, at_b)}"
    forms = [unicodedata.normalize("NFKC", text).translate(_TYPOGRAPHY) for text in (part_a, part_b)]
    if _without_spaces(forms[0]) == _without_spaces(forms[1]):
        return Cause.UNICODE, f"{_char(a, at_a)} / {_char(b, at_b)}"
    if (cause := _json_order(a, b, at_a, at_b)) is not None:
        return cause, ""
    lines = [[line.strip() for line in part.splitlines() if line.strip()] for part in (part_a, part_b)]
    if len(lines[0]) > 1 and in_other_order(*lines):
        return Cause.ITEM_ORDER, "lines"
    if in_other_order(*(_listed(text, at) for text, at in ((a, at_a), (b, at_b)))):
        return Cause.ITEM_ORDER, ""
    if (found := name_volatile(a, b, at_a, at_b)) is not None:
        cause, x, y = found
        return cause, f"{x!r} / {y!r}"
    return None


def in_other_order(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether two lists hold the same items, however ordered."""
    return len(ours) == len(theirs) and sorted(map(repr, ours)) == sorted(map(repr, theirs))


def _listed(text: str, at: int) -> list[str]:
    """The items of the list, separated by commas, semicolons or bars, that a line (or bracket) holds around a character."""
    start = max(text.rfind(mark, 0, at) for mark in ("\n", ": ", *_OPEN, "(")) + 1
    ends = (text.find(mark, at) for mark in ("\n", ". ", *_CLOSE, ")"))
    end = min((end for end in ends if end >= 0), default=len(text))
    return [item.strip() for item in _SEPARATORS.split(text[start:end])]


def _json_order(a: str, b: str, at_a: int, at_b: int) -> Cause | None:
    """Whether the difference lies in JSON that is equal but for the order of its keys or items."""
    for start in _open_brackets(a, at_a):
        if at_b - (at_a - start) < 0:
            continue
        x, y = _read_json(a, start), _read_json(b, at_b - (at_a - start))
        if x is None or y is None:
            continue
        if unordered(x) == unordered(y):
            return Cause.KEY_ORDER
        if isinstance(x, list) and isinstance(y, list) and in_other_order(
            [unordered(item) for item in x], [unordered(item) for item in y]
        ):  # fmt: skip
            is_tools = all(isinstance(item, dict) and ("name" in item or "function" in item) for item in x)
            return Cause.TOOL_ORDER if is_tools else Cause.ITEM_ORDER
    return None


def _open_brackets(text: str, at: int) -> list[int]:
    """Where the JSON values begin that are open at a character, innermost first."""
    found: list[int] = []
    depth = 0
    for index in range(at - 1, -1, -1):
        if text[index] in _CLOSE:
            depth += 1
        elif text[index] in _OPEN:
            if depth:
                depth -= 1
            else:
                found.append(index)
                if len(found) == _MAX_BRACKETS:
                    break
    return found


def _read_json(text: str, start: int) -> Any:
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _char(text: str, at: int) -> str:
    return repr(text[at]) if at < len(text) else "the end"

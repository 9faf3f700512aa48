"""An explanation for people, laid out like a compiler's diagnostic."""

import unicodedata
from collections.abc import Iterator

from jaxkv.explain.cause import TITLES
from jaxkv.explain.place import Place
from jaxkv.explain.report import Explanation, Side


def to_text(explanation: Explanation) -> str:
    """Several lines; control characters in prompts are shown as escapes."""
    return "\n".join(_lines(explanation))


def _lines(e: Explanation) -> Iterator[str]:
    detail = f": {_shown(e.detail)}" if e.detail else ""
    yield f"{'miss' if e.is_fault else 'ok'}[{e.cause.value}]: {e.title}{detail}"
    if e.difference is not None:
        yield from _excerpt(e)
    yield from _numbers(e)
    for cause in e.also:
        yield f"  = also: {TITLES[cause]} [{cause.value}]"
    yield f"  = hint: {e.hint}"
    for note in e.notes:
        yield f"  = note: {_shown(note)}"


def _excerpt(e: Explanation) -> Iterator[str]:
    assert e.difference is not None
    a, b = e.difference.a, e.difference.b
    yield f"  --> {_place(b.place)}; token {e.difference.token} of {e.num_tokens}"
    if a.place != b.place:
        yield f"      (in a: {_place(a.place)})"
    yield "   |"
    for name, side in (("a", a), ("b", b)):
        yield f" {name} | {_shown(side.before)}{_shown(side.after)}"
    caret = " " * _width(_shown(b.before)) + "^"
    yield f"   | {caret} {_token(a)} / {_token(b)}"
    yield "   |"


def _numbers(e: Explanation) -> Iterator[str]:
    if e.num_shared is not None and e.tokens_kept is not None:
        yield (
            f"  = {e.num_shared} tokens shared: {e.pages_kept} pages ({e.tokens_kept} tokens) kept, "
            f"{e.tokens_lost} tokens lost, {e.num_tokens - e.tokens_kept} of {e.num_tokens} to compute"
        )
    if e.cached_now is not None:
        now = e.cached_now
        yield f"  = in the cache now: {now.num_pages} pages, {now.num_tokens} of {e.num_tokens} tokens"


def _place(place: Place) -> str:
    role = f" ({_shown(place.role)})" if place.role else ""
    path = _shown(place.path)
    if place.kind == "template":
        return f"the chat template's own text, {path}{role}"
    character = f", character {place.character}" if place.character is not None else ""
    return f"{path}{role}{character}"


def _token(side: Side) -> str:
    return "the end" if side.token_id is None else repr(side.token_text)


def _shown(text: str) -> str:
    """Text on one line, without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)

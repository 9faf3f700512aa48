"""Does a chat template keep what it wrote? Appending a turn must only append text, or cached prefixes are lost.

A template is asked, not read: small chats are rendered turn by turn, and each text must begin with the one before it.
Where one does not, leaving things out of the chat (tools, reasoning, the system message) tells which of them moved.
"""

import dataclasses
import datetime
import enum
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxkv.chats.chat import ChatTemplate
from jaxkv.chats.template_probes import PROBES, SYSTEM, TOOLS, TURNS, WRITTEN_THOUGHTS
from jaxkv.errors import RequestError
from jaxkv.plain_json import plain

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, tools=..., add_generation_prompt=...) -> text; raises RequestError
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_THINK = ("<think>", "</think>")


class RewriteKind(enum.StrEnum):
    """What a template does to text that it wrote before."""

    DATE = "date"
    TOOLS = "tools"
    REASONING = "reasoning"
    SYSTEM = "system"
    GENERATION_PROMPT = "generation prompt"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One way in which a template breaks prefixes."""

    kind: RewriteKind
    what: str  # as the end of "the template ..."


_WHAT = {
    RewriteKind.TOOLS: "moves the tools to a later message with each turn",
    RewriteKind.REASONING: "strips the reasoning of earlier turns",
    RewriteKind.SYSTEM: "moves the system message to a later message with each turn",
    RewriteKind.GENERATION_PROMPT: "starts an answer with text that it leaves out once the answer is given",
}


def template_is_stable(template: ChatTemplate, special_tokens: Mapping[str, str] | None = None) -> bool:
    """Whether appending turns, and waiting, only ever appends text; see `check_template`."""
    return not check_template(template, special_tokens)


def check_template(template: ChatTemplate, special_tokens: Mapping[str, str] | None = None) -> tuple[Rewrite, ...]:
    """The ways in which a template rewrites earlier text, at most one of each kind; empty if it is stable.

    Chats that the template refuses (tools where it knows none, say) tell nothing and are passed over.

    Args:
        template: is rendered some forty times, once for all equal templates (0.01 s).
        special_tokens: as `ChatTemplate.render` takes them.
    """
    sources, special = tuple(sorted(template.sources.items())), tuple(sorted((special_tokens or {}).items()))
    return _check(sources, template.name, special)


def warn_if_unstable(template: ChatTemplate, special_tokens: Mapping[str, str] | None = None) -> None:
    """Logs one warning for each template that rewrites what it wrote, however often it is asked."""
    found = check_template(template, special_tokens)
    key = tuple(sorted(template.sources.items()))
    if not found or key in _warned:
        return
    _warned.add(key)
    log.warning(
        "the chat template rewrites earlier tokens, which ends prefix-cache hits there: it %s",
        "; it ".join(rewrite.what for rewrite in found),
    )


_warned: set[tuple[tuple[str, str], ...]] = set()


def name_rewrite(
    render: Render, earlier: Sequence[Message], later: Sequence[Message], tools: Sequence[Message] | None
) -> Rewrite:
    """Why the text of a chat does not begin with the text of its own beginning.

    Args:
        render: the template.
        earlier: the first messages of `later`.
        later: the chat.
        tools: of both.
    """
    pair = (earlier, later)
    if tools and _keeps(render, *pair, None):
        return Rewrite(RewriteKind.TOOLS, _WHAT[RewriteKind.TOOLS])
    if _keeps(render, *pair, tools, generation=False):
        return Rewrite(RewriteKind.GENERATION_PROMPT, _WHAT[RewriteKind.GENERATION_PROMPT])
    for kind, without in ((RewriteKind.REASONING, without_reasoning), (RewriteKind.SYSTEM, _without_system)):
        changed = (without(earlier), without(later))
        if changed != (list(earlier), list(later)) and (
            _keeps(render, *changed, tools) or _keeps(render, *changed, tools, generation=False)
        ):
            return Rewrite(kind, _WHAT[kind])
    return Rewrite(RewriteKind.OTHER, f"writes other text than before{_where(render, *pair, tools)}")


def text_of(render: Render, messages: Sequence[Message], tools: Any, *, generation: bool = True) -> str:
    """A chat as far as it has come: with an answer's header where one is due."""
    due = generation and messages[-1]["role"] != "assistant"
    return render(messages, tools=tools, add_generation_prompt=due)


@functools.lru_cache(maxsize=64)
def _check(
    sources: tuple[tuple[str, str], ...], name: str | None, special: tuple[tuple[str, str], ...]
) -> tuple[Rewrite, ...]:
    template = ChatTemplate(dict(sources), name=name)
    # Retrieval templates loop over the documents, be there any or not.
    render = functools.partial(template.render, special_tokens=dict(special), now=_MOMENT, documents=())
    found: dict[RewriteKind, Rewrite] = {}
    for messages, tools in PROBES:
        for earlier, later in _appended(messages):
            if not _keeps(render, earlier, later, tools, refused=True):
                rewrite = name_rewrite(render, earlier, later, tools)
                found.setdefault(rewrite.kind, rewrite)
    if _drops_reasoning(render):
        found.setdefault(RewriteKind.REASONING, Rewrite(RewriteKind.REASONING, _WHAT[RewriteKind.REASONING]))
    if (rewrite := date_rewrite(template, dict(special))) is not None:
        found[rewrite.kind] = rewrite
    return tuple(found[kind] for kind in RewriteKind if kind in found)


def _drops_reasoning(render: Render) -> bool:
    """Whether an answer is shown without the <think>...</think> that the model wrote, even right after it."""
    try:
        return "Let me think." not in text_of(render, WRITTEN_THOUGHTS[:2], None)
    except RequestError:
        return False


def _appended(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The chat so far and one or two messages later, for each turn."""
    start = 2 if messages[0]["role"] == "system" else 1
    cuts = range(start, len(messages) + 1)
    for step in (1, 2):
        for earlier, later in zip(cuts, cuts[step:], strict=False):
            yield list(messages[:earlier]), list(messages[:later])


def _keeps(
    render: Render,
    earlier: Sequence[Message],
    later: Sequence[Message],
    tools: Any,
    *,
    generation: bool = True,
    refused: bool = False,
) -> bool:
    """Whether the text of `later` begins with that of `earlier`; `refused` if the template cannot write them."""
    try:
        texts = [text_of(render, messages, tools, generation=generation) for messages in (earlier, later)]
    except RequestError:
        return refused
    return texts[1].startswith(texts[0])


def _where(render: Render, earlier: Sequence[Message], later: Sequence[Message], tools: Any) -> str:
    try:
        before, after = (text_of(render, messages, tools) for messages in (earlier, later))
    except RequestError:
        return ""
    index = next(
        (i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), min(len(before), len(after))
    )
    return f": {before[index : index + 24]!r} became {after[index : index + 24]!r}"


def without_reasoning(messages: Sequence[Message]) -> list[Message]:
    """The messages without what the assistant thought before answering, in fields or between <think> and </think>."""
    changed: list[Message] = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "assistant" and isinstance(content, str) and _THINK[1] in content:
            message = {**message, "content": content.rpartition(_THINK[1])[2].lstrip("\n")}
        changed.append({key: value for key, value in message.items() if key not in REASONING_KEYS})
    return changed


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] not in ("system", "developer")]


# --- the clock ------------------------------------------------------------------------------------------------------

_MOMENT = datetime.datetime(2031, 5, 14, 13, 24, 35)
_LATER = {
    "second": datetime.timedelta(seconds=1),
    "minute": datetime.timedelta(minutes=1),
    "hour": datetime.timedelta(hours=1),
    "day": datetime.timedelta(days=1),
    "month": datetime.timedelta(days=31),
    "year": datetime.timedelta(days=366),
}


def date_rewrite(
    template: ChatTemplate,
    special_tokens: Mapping[str, str] | None = None,
    messages: Sequence[Message] | None = None,
    **arguments: Any,
) -> Rewrite | None:
    """Whether, and how often, a template's text changes while nobody changes the chat.

    Args:
        template: the template.
        special_tokens: as `ChatTemplate.render` takes them.
        messages: the chat; None tries several.
        arguments: more for `ChatTemplate.render`.
    """
    probes = [(plain("messages", messages), arguments)] if messages is not None else [
        (TURNS[:1], {}), ((SYSTEM, TURNS[0]), {}), ((SYSTEM, TURNS[0]), {"tools": TOOLS})
    ]  # fmt: skip
    spans: list[str] = []
    for chat, more in probes:
        render = functools.partial(template.render, chat, special_tokens=special_tokens, **more)
        try:
            text = render(now=_MOMENT)
            spans += itertools.islice((span for span, step in _LATER.items() if render(now=_MOMENT + step) != text), 1)
        except RequestError:
            continue
    if not spans:
        return None
    span = min(spans, key=list(_LATER).index)
    return Rewrite(RewriteKind.DATE, f"writes the date or time (its text changes every {span})")

"""`explain`: compares the prompts and keys of two requests, or of one with what a live engine has."""

import datetime
from typing import Any

from jaxkv.chats.template_check import date_rewrite
from jaxkv.errors import RequestError
from jaxkv.explain.ask import Ask, chat_template, parse_ask
from jaxkv.explain.cause import NO_FAULT, Cause
from jaxkv.explain.decide import Finding, Pair, find_cause
from jaxkv.explain.layout import Layout, Layouter
from jaxkv.explain.place import Place, find_place
from jaxkv.explain.report import CachedNow, Difference, Explanation, Side
from jaxkv.explain.texts import common_prefix, parting
from jaxkv.tokenizer import Tokenizer

_CONTEXT = 48  # characters shown on each side of a difference
_CONTEXT_IDS = 6  # the same for prompts of token ids


def explain(
    a: Any,
    b: Any,
    *,
    tokenizer: Tokenizer | None,
    page_size: int = 16,
    cached_now: CachedNow | None = None,
    now: datetime.datetime | None = None,
) -> Explanation:
    """Says how much of request `b` the pages of request `a` save, and why not more.

    Nothing is run: both are laid out with the chat template and encoded.

    Args:
        a: the earlier request, as `parse_ask` reads it; None: only look `b` up in `cached_now`.
        b: the later request.
        tokenizer: of the model, with its chat template; None allows token-id prompts only.
        page_size: tokens in a page; only full pages are reused.
        cached_now: what a live engine has of `b`.
        now: the time for templates that write it; None is the clock's, the same for both.

    Raises:
        RequestError: a request is malformed, or the template refuses it; the message says which one.
    """
    if page_size < 1:
        raise RequestError(f"page_size={page_size} must be >= 1")
    layouter = Layouter(tokenizer, now or datetime.datetime.now())
    late = _lay_out(layouter, parse_ask(b, "the request" if a is None else "request b"), "request b")
    if a is None:
        return _looked_up(late, layouter, page_size, cached_now)
    early = _lay_out(layouter, parse_ask(a, "request a"), "request a")
    shared = common_prefix(early.token_ids, late.token_ids)
    shorter = min(len(early.token_ids), len(late.token_ids))
    reusable = min(shared, len(late.token_ids) - 1) // page_size * page_size
    potential = min(shorter, len(late.token_ids) - 1) // page_size * page_size
    parts = _parts(early, late, shared)
    pair = _difference(layouter, early, late, shared) if parts else None

    findings = _key_findings(early.ask, late.ask, len(late.token_ids))
    kept = 0 if findings else reusable
    if cached_now is not None and cached_now.num_pages * page_size < kept:
        findings.append(Finding(Cause.EVICTED, f"{cached_now.num_pages} of {kept // page_size} pages are there"))
    if not potential:
        findings.append(Finding(Cause.BELOW_PAGE, f"{shorter} tokens; a page has {page_size}"))
    if pair is not None:
        found = find_cause(pair)
        if found.cause is Cause.NEW_TURN and not reusable and potential:
            found = Finding(Cause.BELOW_PAGE, f"{shared} tokens; a page has {page_size}")
        findings.append(found)
    else:
        findings.append(Finding(Cause.EQUAL if early.token_ids == late.token_ids else Cause.PREFIX))
    first, *rest = findings
    is_fault = first.cause not in NO_FAULT
    return Explanation(
        cause=first.cause,
        also=tuple(dict.fromkeys(f.cause for f in rest if f.cause not in NO_FAULT and f.cause is not first.cause)),
        detail=first.detail,
        notes=(*_notes(layouter, early, late, shared, parts, findings), *_cache_notes(cached_now)),
        differs=parts or any(finding.cause in _KEYS for finding in findings),
        page_size=page_size,
        num_tokens=len(late.token_ids),
        num_tokens_a=len(early.token_ids),
        num_shared=shared,
        tokens_kept=kept,
        tokens_lost=potential - kept if is_fault else 0,
        difference=None if pair is None else pair.difference,
        cached_now=cached_now,
    )


_KEYS = (Cause.MODEL, Cause.ADAPTER, Cause.SALT)


def _looked_up(late: Layout, layouter: Layouter, page_size: int, cached: CachedNow | None) -> Explanation:
    """One request against the cache alone."""
    num_tokens = len(late.token_ids)
    num_full = (num_tokens - 1) // page_size
    num_cached = 0 if cached is None else cached.num_pages
    detail, cause = "", Cause.CACHED
    if late.ask.prompt_logprobs is not None:
        cause = Cause.SCORED
    elif not num_full:
        cause, detail = Cause.BELOW_PAGE, f"{num_tokens} tokens; a page has {page_size}"
    elif num_cached < num_full:
        start = num_cached * page_size
        cause = Cause.NOT_CACHED
        detail = f"the key of page {num_cached} (tokens {start} to {start + page_size - 1}) is unknown"
    return Explanation(
        cause=cause,
        detail=detail,
        notes=(*_single_notes(layouter, late, "the request"), *_cache_notes(cached)),
        differs=False,
        page_size=page_size,
        num_tokens=num_tokens,
        cached_now=cached,
    )


def _lay_out(layouter: Layouter, ask: Ask, where: str) -> Layout:
    try:
        layout = layouter.lay_out(ask)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    if not layout.token_ids:
        raise RequestError(f"{where} is empty; a prompt needs at least one token")
    return layout


def _parts(early: Layout, late: Layout, shared: int) -> bool:
    """Whether neither prompt is the beginning of the other, as tokens or as text."""
    if shared == min(len(early.token_ids), len(late.token_ids)):
        return False
    if early.text is None or late.text is None:
        return True
    return not (early.text.startswith(late.text) or late.text.startswith(early.text))


def _key_findings(early: Ask, late: Ask, num_tokens: int) -> list[Finding]:
    """What forbids any reuse, whatever the tokens are."""
    found = []
    for cause, x, y in (
        (Cause.MODEL, early.model, late.model),
        (Cause.ADAPTER, early.adapter or "", late.adapter or ""),
        (Cause.SALT, early.cache_salt, late.cache_salt),
    ):
        if x is not None and y is not None and x != y:
            found.append(Finding(cause, f"{x!r} / {y!r}"))
    if late.prompt_logprobs is not None and num_tokens > 1:
        found.append(Finding(Cause.SCORED, f"prompt_logprobs={late.prompt_logprobs}"))
    return found


def _difference(layouter: Layouter, early: Layout, late: Layout, shared: int) -> Pair:
    if early.text is None or late.text is None:
        at = (shared, shared)
        sides = [_id_side(layouter, layout, shared) for layout in (early, late)]
    else:
        starts = [layouter.start_of(layout, shared) for layout in (early, late)]
        at = parting(early.text, late.text, *starts)
        sides = [_text_side(layouter, layout, shared, at[i]) for i, layout in enumerate((early, late))]
    return Pair(early, late, *at, Difference(token=shared, a=sides[0], b=sides[1]), layouter.render)


def _text_side(layouter: Layouter, layout: Layout, token: int, at: int) -> Side:
    assert layout.text is not None
    return Side(
        **_token_of(layouter, layout, token),
        place=find_place(layout.ask, layout.text, at, layouter.render),
        before=layout.text[max(at - _CONTEXT, 0) : at],
        after=layout.text[at : at + _CONTEXT],
    )


def _id_side(layouter: Layouter, layout: Layout, token: int) -> Side:
    ids = layout.token_ids
    return Side(
        **_token_of(layouter, layout, token),
        place=Place("prompt", "prompt", character=token),
        before="".join(f"{each} " for each in ids[max(token - _CONTEXT_IDS, 0) : token]),
        after=" ".join(map(str, ids[token : token + _CONTEXT_IDS])),
    )


def _token_of(layouter: Layouter, layout: Layout, token: int) -> dict[str, Any]:
    if token >= len(layout.token_ids):
        return {"token_id": None, "token_text": ""}
    token_id = layout.token_ids[token]
    return {"token_id": token_id, "token_text": layouter.token_text(token_id)}


def _notes(
    layouter: Layouter, early: Layout, late: Layout, shared: int, parts: bool, findings: list[Finding]
) -> list[str]:
    notes = _single_notes(layouter, early, "request a")
    notes += [note for note in _single_notes(layouter, late, "request b") if note not in notes]
    if not parts and shared < min(len(early.token_ids), len(late.token_ids)):
        notes.insert(0, f"the shorter prompt's tokens from {shared} on merge with the text that follows")
    if any(finding.cause is Cause.TEMPLATE_DATE for finding in findings):
        notes = [note for note in notes if not note.startswith("the chat template writes")]
    return notes


def _single_notes(layouter: Layouter, layout: Layout, where: str) -> list[str]:
    notes, ask = [], layout.ask
    if ask.messages is not None and layouter.tokenizer is not None:
        rewrite = date_rewrite(
            chat_template(ask, layouter.tokenizer.chat_template), layouter.tokenizer.special.texts, ask.messages,
            tools=ask.tools, documents=ask.documents, variables=ask.variables,
        )  # fmt: skip
        if rewrite is not None:
            notes.append(f"the chat template {rewrite.what}: no hit goes beyond it when it does")
    if ask.unread:
        notes.append(f"{where} has fields that were not looked at: {', '.join(ask.unread)}")
    return notes


def _cache_notes(cached: CachedNow | None) -> list[str]:
    if cached is None:
        return []
    return [] if cached.is_on else ["this engine keeps no prefix cache; load it with prefix_cache=True"]

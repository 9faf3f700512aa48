"""`explain` names the cause of hand-made pairs of requests, over several families' templates, and where they part."""

import datetime
import json
from typing import Any

import pytest

from jaxkv.explain import Cause, Explanation, explain, to_text
from jaxkv.explain.report import CachedNow
from jaxkv.tokenizer import Tokenizer
from jaxkv.tokenizer.base import ChatTemplate
from tests.explain.pairs import LONG, PAIRS, RULES, TEMPLATES, chat
from tests.tokenizer import tiny

PAGE = 8
NOW = datetime.datetime(2026, 3, 1, 12)


def tokenizer_with(template: str, kind: str = "byte_level") -> Tokenizer:
    tokenizer = tiny.load(kind)
    return Tokenizer(tokenizer.vocabulary, tokenizer.special, ChatTemplate(TEMPLATES[template]))


def compare(a: Any, b: Any, template: str, kind: str = "byte_level", **more: Any) -> Explanation:
    return explain(a, b, tokenizer=tokenizer_with(template, kind), page_size=PAGE, now=NOW, **more)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram"])
@pytest.mark.parametrize("name", PAIRS)
def test_cause(name: str, kind: str) -> None:
    (a, b, template, where), cause = PAIRS[name]
    found = compare(a, b, template, kind)
    if kind == "unigram" and cause in (Cause.WHITESPACE, Cause.UNICODE) and not found.differs:
        assert found.cause is Cause.EQUAL  # this tokenizer does not see the difference
        return
    assert found.cause is cause, to_text(found)
    if where is None:
        return
    assert found.difference is not None
    assert found.difference.b.place.path == where
    assert json.loads(json.dumps(found.to_json()))["cause"] == cause.value


@pytest.mark.parametrize("name", PAIRS)
def test_numbers(name: str) -> None:
    (a, b, template, _), _ = PAIRS[name]
    found = compare(a, b, template)
    ids = [compare(None, each, template).num_tokens for each in (a, b)]
    assert [found.num_tokens_a, found.num_tokens] == ids
    assert found.tokens_kept is not None and found.num_shared is not None and found.tokens_lost is not None
    assert found.tokens_kept % PAGE == 0 and 0 <= found.tokens_kept <= min(found.num_shared, found.num_tokens - 1)
    if found.cause in (Cause.MODEL, Cause.ADAPTER, Cause.SALT, Cause.SCORED):
        assert found.tokens_kept == 0 and found.tokens_lost > 0
    elif found.is_fault and found.cause is not Cause.BELOW_PAGE:
        assert found.tokens_lost == (min(*ids, ids[1] - 1) // PAGE - found.tokens_kept // PAGE) * PAGE
    else:
        assert found.is_fault or found.tokens_lost == 0
    assert found.differs == (found.difference is not None or found.cause in (Cause.MODEL, Cause.ADAPTER, Cause.SALT))


@pytest.mark.parametrize(("num_pages", "cause"), [(2, Cause.EVICTED), (100, Cause.EQUAL)])
def test_evicted(num_pages: int, cause: Cause) -> None:
    request = chat(RULES, LONG)
    found = compare(request, request, "chatml", cached_now=CachedNow(num_pages=num_pages, num_tokens=num_pages * PAGE))
    assert found.cause is cause
    assert found.cached_now is not None and found.cached_now.num_pages == num_pages

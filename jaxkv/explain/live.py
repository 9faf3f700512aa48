"""`explain` against a running engine. It looks only: nothing is taken, counted or moved in the LRU order."""

import datetime
from typing import Any

from jaxkv.explain.ask import parse_ask
from jaxkv.explain.compare import explain
from jaxkv.explain.layout import Layouter
from jaxkv.explain.report import CachedNow, Explanation
from jaxkv.intake import Intake
from jaxkv.request import Request, SamplingParams
from jaxkv.schedule.scheduler import Scheduler


def explain_live(request: Any, previous: Any, *, scheduler: Scheduler, intake: Intake) -> Explanation:
    """Looks a request up in the cache, and compares it with the one that ran before.

    Args:
        request: as `parse_ask` reads it.
        previous: the same; None only looks up.
        scheduler: whose pages are asked for.
        intake: of the engine: checks the request, and has the tokenizer.

    Raises:
        RequestError: a request is malformed, or the chat template refuses it.
    """
    now = datetime.datetime.now()
    ask = parse_ask(request)
    token_ids = Layouter(intake.tokenizer, now).lay_out(ask).token_ids
    params = SamplingParams(max_tokens=1, prompt_logprobs=ask.prompt_logprobs)
    made = intake.make_request("explained", token_ids, params, seed=0, cache_salt=ask.cache_salt)
    return explain(
        previous,
        ask,
        tokenizer=intake.tokenizer,
        page_size=scheduler.config.page_size,
        cached_now=cached_now(scheduler, made),
        now=now,
    )


def cached_now(scheduler: Scheduler, request: Request) -> CachedNow:
    """The pages that `request` would find if it were admitted now."""
    config = scheduler.config
    if not request.prompt_token_ids:
        return CachedNow(num_pages=0, num_tokens=0, is_on=config.prefix_cache)
    reuse = scheduler.find_reuse(request)
    return CachedNow(
        num_pages=len(reuse.pages) + len(reuse.lower_keys), num_tokens=reuse.num_tokens, is_on=config.prefix_cache
    )

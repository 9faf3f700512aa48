"""Can this request ever be served? Asked once, before it is queued (behaviour 10)."""

from jaxkv.config import SchedulerConfig
from jaxkv.errors import CapacityError, RequestError
from jaxkv.request import Request, SamplingParams


def check_cached(request: Request, config: SchedulerConfig) -> None:
    """Refuses what asks for something of a prefix cache that is not there.

    Raises:
        RequestError: it does.
    """
    if not config.prefix_cache and (request.marks or request.cache_key):
        name = "prompt_cache_key" if request.cache_key else "cache_control or prompt_cache_retention"
        raise RequestError(f"{name} needs the prefix cache, which is off; load with prefix_cache=True or leave it out")


def check_whole(prompt_len: int, params: SamplingParams, min_tokens: int, config: SchedulerConfig) -> None:
    """Refuses a structured output that cannot be whole within the tokens it may have.

    Args:
        prompt_len: tokens in the prompt.
        params: what is asked of it.
        min_tokens: fewest tokens that the structure takes, the end token not counted.
        config: the limits.

    Raises:
        RequestError: it cannot.
    """
    if min_tokens > params.max_tokens:
        raise RequestError(
            f"max_tokens={params.max_tokens} is too few: the shortest output that the structure allows takes {min_tokens} tokens"
        )
    if prompt_len + min_tokens > config.max_len:
        raise RequestError(
            f"prompt_len={prompt_len} leaves {config.max_len - prompt_len} of max_len={config.max_len} tokens: the shortest "
            f"output that the structure allows takes {min_tokens}"
        )


def check_fits(prompt_len: int, params: SamplingParams, config: SchedulerConfig) -> None:
    """Refuses a prompt that could never run, even alone.

    A request whose `max_tokens` exceeds the room is fine: it ends when `max_len` is reached.

    Args:
        prompt_len: tokens in the prompt.
        params: what is asked of it.
        config: the limits.

    Raises:
        RequestError: the prompt is empty, or it and one new token are longer than `max_len`.
        CapacityError: they need more pages than the pool has.
    """
    if prompt_len < 1:
        raise RequestError("prompt_len=0: a prompt needs at least one token")
    if params.max_tokens == 0 and params.n > 1:
        raise RequestError(f"n={params.n} with max_tokens=0: there is nothing to sample; set n=1")
    num_new = min(params.max_tokens, 1)
    what = f"prompt_len={prompt_len}" + " plus one new token" * num_new
    if prompt_len + num_new > config.max_len:
        raise RequestError(
            f"{what} exceeds max_len={config.max_len}; shorten the prompt or raise max_len (or num_pages, if the pool lowered it)"
        )
    num_pages = config.paging.num_needed(prompt_len + num_new)
    if num_pages > config.num_pages - 1:
        raise CapacityError(
            f"{what} needs {num_pages} pages of {config.page_size} tokens, {config.pool_name} has {config.num_pages - 1}; "
            "shorten the prompt or raise num_pages"
        )

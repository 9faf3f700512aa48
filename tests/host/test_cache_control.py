"""What callers may say about the cache, and what is refused, with the words."""

import pytest

from jaxkv import CacheControl
from jaxkv.cache_control import Caching, Mark
from jaxkv.errors import RequestError
from jaxkv.intake import Intake
from jaxkv.request import SamplingParams


def test_breakpoints_become_marks():
    control = CacheControl(breakpoints=[16, 100], ttl="1h")
    assert Caching(control=control).marks(100) == (Mark(16, 3600.0), Mark(100, 3600.0))


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300), ("1h", 3600), ("24h", 86400), (90, 90), (0.5, 0.5)])
def test_without_breakpoints_the_whole_prompt_is_kept(ttl: str | float, seconds: float):
    assert Caching(control=CacheControl(ttl=ttl)).marks(7) == (Mark(7, seconds),)


def test_retention():
    assert Caching(retention="24h").marks(7) == (Mark(7, 86400.0),)
    assert Caching(retention="in_memory").marks(7) == Caching().marks(7) == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttl": "2h"}, r"ttl='2h' must be one of 5m, 1h, 24h, or seconds > 0"),
        ({"ttl": 0}, r"ttl=0 must be"),
        ({"ttl": float("nan")}, r"ttl=nan must be"),
        ({"ttl": True}, r"ttl=True must be"),
        ({"ttl": None}, r"ttl=None must be"),
        ({"breakpoints": []}, r"breakpoints=\[\] must ascend; leave them out to keep the whole prompt"),
        ({"breakpoints": [3, 3]}, r"breakpoints=\[3, 3\] must ascend"),
        ({"breakpoints": [5, 3]}, r"must ascend"),
        ({"breakpoints": [1.5]}, r"whole numbers >= 0"),
        ({"breakpoints": [-1]}, r"whole numbers >= 0"),
        ({"breakpoints": "16"}, r"breakpoints='16' must be a list"),
        ({"breakpoints": 16}, r"breakpoints=16 must be a list"),
        ({"breakpoints": [1, 2, 3, 4, 5]}, r"5 cache breakpoints; the limit is 4"),
    ],
)
def test_malformed_controls_are_refused(fields: dict, message: str):
    with pytest.raises(RequestError, match=message):
        CacheControl(**fields)


@pytest.mark.parametrize(
    ("caching", "message"),
    [
        (Caching(control=CacheControl(breakpoints=[8])), r"breakpoints=\[8\] must lie within the prompt of 7 tokens"),
        (Caching(control=CacheControl(breakpoints=[0, 3])), r"must lie within"),
        (Caching(control={"ttl": "5m"}), r"must be a CacheControl"),
        (Caching(retention="1h"), r"prompt_cache_retention='1h' must be one of in_memory, 24h"),
        (Caching(retention="24h", control=CacheControl()), r"'24h' and cache_control both say how long .* give one"),
        (Caching(retention="in_memory", chat_marks=(Mark(3, 1.0),)), r"'in_memory' and cache_control both say"),
    ],
)
def test_what_does_not_fit_the_prompt_or_each_other_is_refused(caching: Caching, message: str):
    with pytest.raises(RequestError, match=message):
        caching.marks(7)


@pytest.mark.parametrize(("key", "message"), [(7, "prompt_cache_key=7 must be text"), ("\ud800", "not valid Unicode")])
def test_keys_are_texts(key: object, message: str):
    intake = Intake(vocab_size=10, eos_ids=())
    with pytest.raises(RequestError, match=message):
        intake.make_request("a", [1], SamplingParams(), seed=0, cache_key=key)

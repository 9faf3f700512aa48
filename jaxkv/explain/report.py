"""`Explanation`: what is known about one miss, as plain data."""

import dataclasses
from typing import Any

from jaxkv.explain.cause import HINTS, NO_FAULT, TITLES, Cause
from jaxkv.explain.place import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of two prompts, around their first difference."""

    token_id: int | None  # the first token that differs; None where the prompt has ended
    token_text: str
    place: Place
    before: str  # text before the first character that differs
    after: str  # text from there on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two prompts part."""

    token: int  # index of the first token that differs
    a: Side  # the earlier request
    b: Side


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedNow:
    """What a live engine has of a prompt, on the data shard that has most."""

    num_pages: int
    num_tokens: int
    is_on: bool = True  # False: the engine was loaded with prefix_cache=False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why the later request `b` can, or cannot, reuse what the earlier request `a` computed.

    All counts are of tokens or pages of `b`. Where there is no earlier request, what `b` shares is unknown (None).
    """

    cause: Cause
    also: tuple[Cause, ...] = ()  # what else stands in the way
    detail: str = ""  # names what differs: "2026-03-01 09:14" / "2026-03-01 09:15"
    notes: tuple[str, ...] = ()
    differs: bool  # whether tokens or keys of the shorter prompt differ
    page_size: int
    num_tokens: int
    num_tokens_a: int | None = None
    num_shared: int | None = None  # leading tokens that are the same
    tokens_kept: int | None = None  # of these, in full pages that can be reused
    tokens_lost: int | None = None  # more that could be reused if the shorter prompt were the beginning of the other
    difference: Difference | None = None
    cached_now: CachedNow | None = None

    @property
    def title(self) -> str:
        """The cause in words."""
        return TITLES[self.cause]

    @property
    def hint(self) -> str:
        """What to do about it."""
        return HINTS[self.cause]

    @property
    def is_fault(self) -> bool:
        """Whether something could be done better."""
        return self.cause not in NO_FAULT

    @property
    def pages_kept(self) -> int | None:
        return None if self.tokens_kept is None else self.tokens_kept // self.page_size

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            **dataclasses.asdict(self),
            "title": self.title,
            "hint": self.hint,
            "is_fault": self.is_fault,
            "pages_kept": self.pages_kept,
        }

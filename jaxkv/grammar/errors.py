"""What a grammar can be refused for."""

from jaxkv.errors import RequestError


class UnsupportedSchema(RequestError):
    """A keyword cannot be enforced exactly.

    Attributes:
        keyword: its name.
        path: where it stands, as a JSON pointer with `#` in front.
    """

    def __init__(self, keyword: str, path: str, reason: str) -> None:
        super().__init__(f"JSON Schema keyword {keyword!r} at {path} cannot be enforced: {reason}")
        self.keyword = keyword
        self.path = path
        self.reason = reason


class InvalidSchema(RequestError):
    """The schema itself is wrong: a keyword has a value that the standard does not allow, or a reference leads nowhere."""


class RegexError(RequestError):
    """A regular expression is wrong, or uses a construct that no finite automaton has."""


class TooLarge(RequestError):
    """The automaton would need more than the budget; the grammar can be served by a host matcher instead."""

"""What a schema says of a value, as a boolean formula.

Formulas are interned: equal ones are one object, so that they can be keys. Atoms speak of one type of value and hold for all
values of other types, as the keywords of JSON Schema do.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

NULL, TRUE, FALSE, NUMBER, STRING, ARRAY, OBJECT = TYPES = tuple(1 << bit for bit in range(7))
BOOLEAN = TRUE | FALSE
ALL_TYPES = (1 << 7) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Formula:
    """One formula.

    Kinds and their arguments, beside `and`, `or` (formulas), `not` (formula), `one_of` (formulas of
    which exactly one holds) and `lazy` (key of a schema not read yet):

    - `type` (mask): the value is of one of these types. True and False are types of their own.
    - string: `pattern` (automaton), `no_pattern` (automaton), `length` (least, most or None).
    - number: `compare` (relation, decimal), `multiple` (decimal), `no_multiple` (decimal), `numbers` (decimals), `written`
      ("integer" or "other"): draft 4 goes by how a number is written.
    - array: `items` (formula of each first item, formula of all others), `count` (least, most),
      `contains` (formula, least, most, from which index), `unique` (path), `repeated` (path).
    - object: `properties` ((name, formula), ...; (automaton of names, formula), ...; formula of all others), `required` (name),
      `size` (least, most), `names` (formula), `exists` (names not meant, automata of names not meant, automaton of names meant or
      None, formula): a property that is so named and so valued, `exists_name` (formula): a property whose name is so.
    - `unsupported` (mask, keyword, path, reason): cannot be built for values of these types.
    """

    number: int
    kind: str
    args: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.kind}{self.args}"


ATOM_TYPE = {
    "pattern": STRING, "no_pattern": STRING, "length": STRING,
    "compare": NUMBER, "multiple": NUMBER, "no_multiple": NUMBER, "numbers": NUMBER,
    "written": NUMBER,
    "items": ARRAY, "count": ARRAY, "contains": ARRAY, "unique": ARRAY, "repeated": ARRAY,
    "properties": OBJECT, "required": OBJECT, "size": OBJECT, "names": OBJECT, "exists": OBJECT,
    "exists_name": OBJECT,
}  # fmt: skip


class Pool:
    """Makes formulas, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Formula] = {}
        self.true = self._make("and", ())
        self.false = self._make("or", ())

    def _make(self, kind: str, args: tuple[Any, ...]) -> Formula:
        key = (kind, *args)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Formula(len(self._known), kind, args)
        return found

    def atom(self, kind: str, *args: Any) -> Formula:
        """An atom, or a `lazy` formula."""
        return self._make(kind, args)

    def type(self, mask: int) -> Formula:
        """The value has one of the types."""
        if mask == ALL_TYPES:
            return self.true
        return self._make("type", (mask,)) if mask else self.false

    def all(self, parts: Iterable[Formula]) -> Formula:
        """All parts hold."""
        return self._gather("and", parts, self.true, self.false)

    def any(self, parts: Iterable[Formula]) -> Formula:
        """A part holds."""
        return self._gather("or", parts, self.false, self.true)

    def _gather(self, kind: str, parts: Iterable[Formula], neutral: Formula, absorbing: Formula) -> Formula:
        flat: dict[Formula, None] = {}
        mask = ALL_TYPES if kind == "and" else 0
        for part in parts:
            for inner in part.args if part.kind == kind else (part,):
                if inner.kind == "type":
                    mask = mask & inner.args[0] if kind == "and" else mask | inner.args[0]
                else:
                    flat[inner] = None
        types = self.type(mask)
        if types is absorbing or absorbing in flat:
            return absorbing
        flat.pop(neutral, None)
        whole = ([] if types is neutral else [types]) + list(flat)
        return whole[0] if len(whole) == 1 else self._make(kind, tuple(whole)) if whole else neutral

    def negate(self, part: Formula) -> Formula:
        """The part does not hold."""
        if part is self.true:
            return self.false
        if part is self.false:
            return self.true
        if part.kind == "not":
            return part.args[0]
        if part.kind == "type":
            return self.type(ALL_TYPES & ~part.args[0])
        return self._make("not", (part,))

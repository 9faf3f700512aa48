"""Atoms that stand for a keyword which cannot be enforced."""

from typing import NoReturn

from jaxkv.grammar.errors import UnsupportedSchema
from jaxkv.grammar.schema.formula import Formula


def refuse(atom: Formula) -> NoReturn:
    """Raises what an `unsupported` atom says."""
    _, keyword, path, reason = atom.args
    raise UnsupportedSchema(keyword, path, reason)

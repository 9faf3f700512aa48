r"""Regular expressions as automata.

A pattern becomes an automaton over UTF-8, or over the text of a JSON string, where a quote is written `\"`: patterns of
JSON Schema speak of the decoded string.
"""

import functools

from jaxkv.grammar import algebra, chars
from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import DEFAULT_BUDGET, Budget
from jaxkv.grammar.chars import CharWriter
from jaxkv.grammar.determinise import determinise
from jaxkv.grammar.errors import RegexError, TooLarge
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.regex_parser import Alternatives, Chars, Concat, End, Lookahead, Node, Repeat, Start, parse


def compile_regex(pattern: str, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """The texts that match a pattern from their first to their last character (`^` and `$` may but need not be written).

    Args:
        pattern: ECMA-262, `u` mode.
        budget: limits of states.

    Raises:
        RegexError: malformed or unsupported.
        TooLarge: over the budget.
    """
    return _compile(parse(pattern), json=False, search=False, budget=budget)


@functools.lru_cache(maxsize=256)
def json_pattern(pattern: str, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """The canonical JSON string contents, without quotes, in which a pattern occurs somewhere (JSON Schema's `pattern`)."""
    return _compile(parse(pattern), json=True, search=True, budget=budget)


@functools.lru_cache(maxsize=256)
def json_whole(pattern: str, budget: Budget = DEFAULT_BUDGET) -> ByteAutomaton:
    """The canonical JSON string contents that match a pattern from end to end."""
    return _compile(parse(pattern), json=True, search=False, budget=budget)


def _compile(node: Node, *, json: bool, search: bool, budget: Budget) -> ByteAutomaton:
    return _Builder(json, budget).compile(node, search=search)


class _Builder:
    def __init__(self, json: bool, budget: Budget) -> None:
        self.json = json
        self.budget = budget
        self.graph = Graph(budget)
        self.writer = CharWriter(self.graph, json=json)
        self.in_loop = 0

    def compile(self, node: Node, *, search: bool) -> ByteAutomaton:
        end = self.any_text(FINAL) if search else FINAL
        start = self.build(node, end)
        if search:
            loop = self.graph.new()
            self.graph.epsilon(loop, start)
            self.graph.epsilon(loop, self.writer.char(chars.ANY, loop))
            start = loop
        return determinise(self.graph, start)

    def any_text(self, after: int) -> int:
        loop = self.graph.new()
        self.graph.epsilon(loop, after)
        self.graph.epsilon(loop, self.writer.char(chars.ANY, loop))
        return loop

    def build(self, node: Node, after: int) -> int:
        """A state from which `node` and then `after` is read."""
        match node:
            case Chars(ranges):
                return self.writer.char(ranges, after)
            case Concat(parts):
                for part in reversed(parts):
                    after = self.build(part, after)
                return after
            case Alternatives(parts):
                return self.graph.union([self.build(part, after) for part in parts])
            case Repeat(part, low, high):
                return self.repeat(part, low, high, after)
            case Start():
                return self.condition(self.graph.at_start, after)
            case End():
                return self.condition(self.graph.at_end, after)
            case Lookahead():
                return self.lookahead(node, after)

    def condition(self, edges: dict[int, list[int]], after: int) -> int:
        if not after:
            return 0
        state = self.graph.new()
        edges.setdefault(state, []).append(after)
        return state

    def repeat(self, part: Node, low: int, high: int | None, after: int) -> int:
        if high is None:
            loop = self.graph.new()
            self.graph.epsilon(loop, after)
            self.in_loop += 1
            self.graph.epsilon(loop, self.build(part, loop))
            self.in_loop -= 1
            after = loop
        else:
            end = after
            for _ in range(high - low):
                after = self.graph.union([self.build(part, after), end])
        for _ in range(low):
            after = self.build(part, after)
        return after

    def lookahead(self, node: Lookahead, after: int) -> int:
        """The texts of what follows, intersected with those that begin with the lookahead's part."""
        if self.in_loop:
            raise RegexError("a lookahead inside a repeat is not supported")
        if self.graph.at_start:
            raise RegexError("'^' after or inside a lookahead is not supported")
        if not after:
            return 0
        rest = determinise(self.graph, after)
        begins = determinise(self.graph, self.build(node.part, self.any_text(FINAL)))
        if self.graph.at_start:
            raise RegexError("'^' after or inside a lookahead is not supported")
        combine = algebra.difference if node.negative else algebra.intersection
        return self.graph.embed(combine(rest, begins, self.budget), FINAL)


__all__ = ["RegexError", "TooLarge", "compile_regex", "json_pattern", "json_whole"]

"""From a form of structured output to an automaton over bytes."""

import itertools
import logging
from collections.abc import Sequence

import numpy as np

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.budget import Budget
from jaxkv.grammar.determinise import determinise
from jaxkv.grammar.errors import TooLarge
from jaxkv.grammar.graph import FINAL, Graph
from jaxkv.grammar.literals import choice
from jaxkv.grammar.regex import compile_regex
from jaxkv.grammar.schema import compile_schema
from jaxkv.structured import CHOICES, Choice, Form, Grammar, JsonObject, JsonSchema, Regex, ToolCalls, Triggered
from jaxkv.tool_formats import BY_NAME, PYTHON_TAG, ToolFormat

log = logging.getLogger(__name__)


def to_automaton(form: Form, budget: Budget | None = None, *, shallow: bool = False) -> ByteAutomaton:
    """The texts of a form.

    Args:
        form: what outputs look like.
        budget: limits of states.
        shallow: see `compile_schema`.

    Raises:
        TooLarge: no automaton of a sensible size has the language; a matcher on the host may.
        RequestError: the form is wrong, or asks for what cannot be enforced; the message names it.
    """
    budget = budget or Budget()
    match form:
        case JsonSchema():
            compiled = compile_schema(
                form.schema,
                whitespace=form.whitespace,  # pyright: ignore[reportArgumentType]
                additional="closed" if form.closed else "schema",
                strict=form.strict,
                budget=budget,
                shallow=shallow,
            )
            if compiled.relaxed:
                log.warning("strict=False: not enforced in this schema: %s", ", ".join(compiled.relaxed))
            if compiled.restricted:
                log.warning("arrays have at most one item in this schema: %s", ", ".join(compiled.restricted))
            return compiled.automaton
        case JsonObject():
            return compile_schema({"type": "object"}, whitespace=form.whitespace, budget=budget).automaton  # pyright: ignore
        case Regex():
            return compile_regex(form.pattern, budget)
        case Choice():
            return choice(form.texts, budget)
        case Triggered():
            return _triggered(form, budget, shallow)
        case ToolCalls():
            return _tool_calls(form, BY_NAME[form.format], budget, shallow)
        case Grammar():
            raise TooLarge("a context-free grammar has no finite automaton")
    raise AssertionError(form)


def _triggered(form: Triggered, budget: Budget, shallow: bool) -> ByteAutomaton:
    """Free text that watches for the beginnings of tags, as Aho and Corasick do (doi:10.1145/360825.360855).

    Free text before a tag and after it are two copies, so that `required` knows whether there was one.
    """
    graph = Graph(budget)
    begins = [tag.begin.encode() for tag in form.tags]
    step, complete = _watch(begins)
    after = graph.new(len(step)) if form.repeat else None
    entries: list[int] = []
    for tag in form.tags:
        rest = FINAL if after is None or tag.end is None else after
        rest = graph.literal(tag.end.encode(), rest) if tag.end is not None else rest
        entries.append(graph.embed(to_automaton(tag.content, budget, shallow=shallow), rest))
    before = graph.new(len(step))
    if after is not None:
        _free_text(graph, after, step, complete, entries, may_end=True)
    _free_text(graph, before, step, complete, entries, may_end=not form.required)
    return determinise(graph, before)


def _tool_calls(form: ToolCalls, style: ToolFormat, budget: Budget, shallow: bool) -> ByteAutomaton:
    """Calls as the model's template writes them; with `choice="auto"` free text may stand before, after, or instead."""
    graph = Graph(budget)
    is_free, may_repeat = form.choice == "auto", form.parallel and form.choice in CHOICES and style.trigger != ""
    after = graph.new()  # what may follow a group of calls
    graph.epsilon(after, FINAL)
    contents = [
        to_automaton(JsonSchema(tool["parameters"], closed=True), budget, shallow=shallow)
        for tool in form.callable_tools
    ]
    body = _calls(graph, form, style, after, contents, in_list=may_repeat)
    if not style.trigger:
        return determinise(graph, _call_or_text(graph, body) if is_free else body)
    step, complete = _watch([style.trigger.encode()])
    text = graph.new(len(step))  # free text, before calls and between them
    _free_text(graph, text, step, complete, [body], may_end=True)
    if may_repeat and style.separator is None:
        graph.epsilon(after, text if is_free else graph.literal(f"\n{style.trigger}".encode(), body))
    return determinise(graph, text if is_free else graph.literal(style.trigger.encode(), body))


def _call_or_text(graph: Graph, body: int) -> int:
    """Llama 3: a call if the first byte or a tag says so, any text otherwise."""
    text = graph.new()
    graph.edge(text, 0, 255, text)
    graph.epsilon(text, FINAL)
    tag = PYTHON_TAG.encode()
    watch = graph.new(len(tag))  # as much of the tag is written
    for index, byte in enumerate(tag):
        follow = watch + index + 1 if index + 1 < len(tag) else body
        apart = sorted({byte, ord("{")} if index == 0 else {byte})  # bytes that do not lead to text
        for low, high in itertools.pairwise([-1, *apart, 256]):
            if low + 1 < high:
                graph.edge(watch + index, low + 1, high - 1, text)
        graph.edge(watch + index, byte, byte, follow)
        graph.epsilon(watch + index, FINAL)
    return graph.union([watch, body])


def _calls(
    graph: Graph, form: ToolCalls, style: ToolFormat, after: int, contents: list[ByteAutomaton], *, in_list: bool
) -> int:
    """What follows a trigger: one call, or a list of them, with what surrounds it."""
    closed = graph.literal(style.close.encode(), after)
    end = graph.new()
    graph.epsilon(end, closed)
    call = graph.new()
    if in_list and style.separator is not None:
        graph.epsilon(end, graph.literal(style.separator.encode(), call))
    starts = []
    for tool, arguments in zip(form.callable_tools, contents, strict=True):
        rest = graph.embed(arguments, graph.literal(b"}", end))
        starts.append(graph.literal(style.begin(tool["name"]).encode(), rest))
    graph.epsilon(call, graph.union(starts))
    return graph.literal(style.open.encode(), call)


def _watch(begins: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """How much of which beginning the newest text is: `step` int [N, 256] and the beginning that a byte completes, or -1.

    None of them is part of another, so that at most one completes at a time.
    """
    prefixes = sorted({begin[:i] for begin in begins for i in range(len(begin))}, key=len)
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    step = np.zeros((len(prefixes), 256), np.int64)
    complete = np.full((len(prefixes), 256), -1, np.int64)
    for prefix, index in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            while text not in number and text not in begins:
                text = text[1:]
            if text in begins:
                complete[index, byte] = begins.index(text)
            else:
                step[index, byte] = number[text]
    return step, complete


def _free_text(
    graph: Graph, first: int, step: np.ndarray, complete: np.ndarray, entries: list[int], *, may_end: bool
) -> None:
    """Makes `len(step)` states from `first` on free text; a complete beginning leads to its entry."""
    for index in range(len(step)):
        targets = [
            entries[complete[index, byte]] if complete[index, byte] >= 0 else first + int(step[index, byte])
            for byte in range(256)
        ]
        start = 0
        for byte in range(1, 257):
            if byte == 256 or targets[byte] != targets[start]:
                graph.edge(first + index, start, byte - 1, targets[start])
                start = byte
        if may_end:
            graph.epsilon(first + index, FINAL)

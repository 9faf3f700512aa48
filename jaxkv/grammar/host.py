"""Grammars that the host matches, step by step: what has no finite automaton, or one that is too large.

llguidance (https://github.com/guidance-ai/llguidance, MIT) parses; `JsonWatch` only keeps an output from ending.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import llguidance.gbnf_to_lark
import llguidance.numpy
import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import Matcher
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.structured import Choice, Form, Grammar, JsonObject, JsonSchema, Regex

_executor: list[llguidance.LLExecutor] = []  # one thread pool for all, started when first needed


class GuidanceMatcher:
    """A parser of llguidance.

    Args:
        parser: at the start.
        size: V, width of the logits.
        end_id: what llguidance thinks ends an output; only a request's stop ids do.
    """

    def __init__(self, parser: llguidance.LLMatcher, size: int, end_id: int) -> None:
        self.parser, self.end_id = parser, end_id
        self.num_words = -(-size // 32)

    @property
    def is_accepting(self) -> bool:
        return self.parser.is_accepting()

    @property
    def error(self) -> str:
        return self.parser.get_error() if self.parser.is_error() else ""

    def consume(self, token_id: int) -> None:
        self.parser.consume_token(token_id)

    def fill(self, mask: np.ndarray) -> None:
        if self.parser.is_stopped():
            mask[:] = 0
        else:
            llguidance.numpy.fill_next_token_bitmask(self.parser, mask.view(np.int32)[None])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class JsonWatch:
    """Free text that may not end before it holds a complete JSON object or array."""

    error = ""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = vocabulary
        self.num_words = -(-vocabulary.size // 32)
        self._text = b""
        self._starts: list[int] = []  # where a value may have begun that is neither complete nor wrong yet
        self.is_accepting = False

    def consume(self, token_id: int) -> None:
        if self.is_accepting:
            return
        new = self._vocabulary.token_bytes(token_id)
        self._starts += [len(self._text) + i for i, byte in enumerate(new) if byte in b"{["]
        self._text += new
        if any(byte in b"}]" for byte in new):
            self._starts = [start for start in self._starts if self._may_be_value(start)]

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0xFFFFFFFF

    def _may_be_value(self, start: int) -> bool:
        """Whether the text from `start` on may still become a JSON value; notes if it is one."""
        text = self._text[start:].decode("utf-8", "replace")
        try:
            _DECODER.raw_decode(text)
            self.is_accepting = True
        except json.JSONDecodeError as error:
            # An error at the end (a literal is cut off), or in a string that is still open, is one that more text mends.
            return error.pos > len(text) - len("-Infinity") or error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):
            return False
        return True


class HostGrammars:
    """Makes matchers for one vocabulary."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """Made when first needed: a second for 128 k tokens."""
        if self._tokenizer is None:
            self._tokenizer = _make_tokenizer(self.vocabulary)
        return self._tokenizer

    def matcher(self, form: Form) -> Callable[[], GuidanceMatcher]:
        """Makes matchers for outputs of a form, each at its start.

        Raises:
            RequestError: llguidance refuses the grammar; the message is its own.
        """
        parser, size, end_id = self._parser(form), self.vocabulary.size, _end_id(self.vocabulary)
        return lambda: GuidanceMatcher(parser.deep_copy(), size, end_id)

    def _parser(self, form: Form) -> llguidance.LLMatcher:
        """A parser at the start of the form's language; copies of it are cheap."""
        try:
            grammar = _to_guidance(form)
        except (ValueError, llguidance.gbnf_to_lark.GbnfToLarkError) as error:
            raise RequestError(f"{form.kind}: {error}") from error
        parser = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0)
        if parser.is_error():
            raise RequestError(f"{form.kind}: {parser.get_error()}")
        return parser


def fill_masks(rows: Sequence[tuple[Matcher | None, tuple[int, ...]]]) -> np.ndarray:
    """The masks of all rows, computed in parallel: uint32 [num_rows, ceil(V / 32)].

    Args:
        rows: matcher and stop ids of each; the stop ids are allowed exactly where the output may end.
    """
    parsers: list[tuple[llguidance.LLMatcher, int]] = []
    masks = np.empty((len(rows), rows[0][0].num_words if rows[0][0] else 0), np.uint32)
    stops: list[tuple[int, int, bool]] = []  # row, stop id, whether it is allowed
    for index, (matcher, stop_ids) in enumerate(rows):
        assert matcher is not None
        may_end = matcher.is_accepting
        stops += [(index, stop, may_end) for stop in stop_ids]
        if isinstance(matcher, GuidanceMatcher) and not matcher.parser.is_stopped():
            parsers.append((matcher.parser, index))
            stops.append((index, matcher.end_id, False))
        else:
            matcher.fill(masks[index])
    if parsers:
        if not _executor:
            _executor.append(llguidance.LLExecutor())
        llguidance.numpy.fill_next_token_bitmask_par(_executor[0], parsers, masks.view(np.int32))
    if stops:
        row, stop, may_end = np.array(stops, np.int64).T
        bit = (1 << (stop % 32)).astype(np.uint32)
        np.bitwise_and.at(masks, (row, stop // 32), ~bit)
        np.bitwise_or.at(masks, (row, stop // 32), np.where(may_end, bit, np.uint32(0)))
    return masks


def _make_tokenizer(vocabulary: TokenVocabulary) -> llguidance.LLTokenizer:
    """The same tokens as the device's tables: ids that grammars never allow spell nothing."""
    spelled = _Spelled(vocabulary, _end_id(vocabulary))
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelled), n_vocab=vocabulary.size)


def _end_id(vocabulary: TokenVocabulary) -> int:
    """llguidance wants one id that ends an output; it must be one that spells nothing."""
    silent = np.flatnonzero(vocabulary.rank_of < 0)
    if not len(silent):
        raise RequestError("this grammar needs a vocabulary with an end-of-sequence token, and this model has none")
    return next((end for end in vocabulary.end_ids if vocabulary.rank_of[end] < 0), int(silent[0]))


class _Spelled:
    """What llguidance asks of a tokenizer. It masks text that is forced down to the tokens that `__call__` gives for it."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenVocabulary, end_id: int) -> None:
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.size)]
        self.eos_token_id = end_id
        self.special_token_ids = [end_id]
        self._encode = vocabulary.encode
        self._id_of = {token: index for index, token in reversed([*enumerate(self.tokens)]) if token}
        self._max_len = max(map(len, self._id_of), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """As the model's tokenizer does; by the longest token that fits where it cannot."""
        if self._encode is not None:
            try:
                ids = self._encode(text.decode())
            except (UnicodeDecodeError, RequestError):  # a part of a character
                ids = []
            if b"".join(self.tokens[token] for token in ids) == text:
                return ids
        return self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            lengths = range(min(len(text), self._max_len), 0, -1)
            length = next((n for n in lengths if text[:n] in self._id_of), None)
            if length is None:  # no token begins so: the text cannot be written from here on
                break
            ids.append(self._id_of[text[:length]])
            text = text[length:]
        return ids


def _to_guidance(form: Form) -> str:
    """The form in llguidance's own notation."""
    make = llguidance.LLMatcher
    match form:
        case JsonSchema():
            return make.grammar_from_json_schema(json.dumps(form.schema), overrides=_json_options(form))
        case JsonObject():
            return make.grammar_from_json_schema('{"type": "object"}', overrides=_json_options(form))
        case Regex():
            return make.grammar_from_regex(form.pattern)
        case Choice():
            return make.grammar_from_lark("start: " + " | ".join(map(json.dumps, form.texts)))
        case Grammar():
            text = llguidance.gbnf_to_lark.gbnf_to_lark(form.text) if form.syntax == "gbnf" else form.text
            return make.grammar_from_lark(text)
    raise RequestError(f"{form.kind} is too large for the device's tables, and has no form that the host could match")


def _json_options(form: JsonSchema | JsonObject) -> Any:
    return {
        "whitespace_flexible": form.whitespace == "flexible",
        "lenient": isinstance(form, JsonSchema) and not form.strict,
    }

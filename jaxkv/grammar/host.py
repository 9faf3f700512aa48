"""Grammars that the host matches, step by step: what has no finite automaton, or one that is too large.

llguidance (https://github.com/guidance-ai/llguidance, MIT) parses; `JsonWatch` only keeps an output from ending.
"""

import json
from collections.abc import Callable
from typing import Any

import llguidance
import llguidance.gbnf_to_lark
import llguidance.numpy
import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.structured import Choice, Form, Grammar, JsonObject, JsonSchema, Regex


class GuidanceMatcher:
    """A parser of llguidance.

    Args:
        parser: at the start.
        size: V, width of the logits.
        end_ids: what llguidance thinks ends an output.
    """

    def __init__(self, parser: llguidance.LLMatcher, size: int, end_ids: tuple[int, ...]) -> None:
        self.parser, self.end_ids = parser, end_ids
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
        llguidance.numpy.fill_next_token_bitmask(self.parser, mask.view(np.int32)[None])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class JsonWatch:
    """Free text that may not end before it holds a complete JSON object or array."""

    error = ""
    end_ids: tuple[int, ...] = ()  # none is kept from its masks

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
    """Makes matchers for one vocabulary.

    Args:
        vocabulary: of the model.
        stop_ids: that requests mostly have; masks with just these need no work after llguidance's.
    """

    def __init__(self, vocabulary: TokenVocabulary, stop_ids: tuple[int, ...] = ()) -> None:
        self.vocabulary = vocabulary
        self._end_ids = _end_ids(vocabulary, stop_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """Made when first needed: a second for 128 k tokens."""
        if self._tokenizer is None:
            self._tokenizer = _make_tokenizer(self.vocabulary, self._end_ids)
        return self._tokenizer

    def matcher(self, form: Form) -> Callable[[], GuidanceMatcher]:
        """Makes matchers for outputs of a form, each at its start.

        Raises:
            RequestError: llguidance refuses the grammar; the message is its own.
        """
        parser, size, end_ids = self._parser(form), self.vocabulary.size, self._end_ids
        return lambda: GuidanceMatcher(parser.deep_copy(), size, end_ids)

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


def _make_tokenizer(vocabulary: TokenVocabulary, end_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    """The same tokens as the device's tables: ids that grammars never allow spell nothing."""
    wrapper = llguidance.TokenizerWrapper(_Spelled(vocabulary, end_ids))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=[*end_ids])


def _end_ids(vocabulary: TokenVocabulary, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """llguidance wants ids that end an output; they must be ones that spell nothing."""
    silent = np.flatnonzero(vocabulary.rank_of < 0)
    if not len(silent):
        raise RequestError("this grammar needs a vocabulary with an end-of-sequence token, and this model has none")
    return tuple(sorted({*stop_ids} & {*silent.tolist()})) or (int(silent[0]),)


class _Spelled:
    """What llguidance asks of a tokenizer. It masks text that is forced down to the tokens that `__call__` gives for it."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenVocabulary, end_ids: tuple[int, ...]) -> None:
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.size)]
        self.eos_token_id = end_ids[0]
        self.special_token_ids = [*end_ids]
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

"""Compiles grammars for one vocabulary, off the thread that runs the engine, each once."""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable

import numpy as np

from jaxkv.errors import RequestError
from jaxkv.grammar.compiled import CompiledGrammar, OnDevice, OnHost
from jaxkv.grammar.errors import TooLarge, UnsupportedSchema
from jaxkv.grammar.forms import to_automaton
from jaxkv.grammar.host import HostGrammars, JsonWatch
from jaxkv.grammar.tables import TokenTables, build_tables
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.structured import Form, JsonSchema, ToolCalls, Triggered

CACHE_BYTES = 512 << 20  # of tables kept for requests to come
NUM_THREADS = 2
NUM_CHOICES = 8  # of words for which a vocabulary, its trie and its templates are kept: half a second for 128 k tokens


@dataclasses.dataclass(frozen=True)
class Words:
    """Which tokens a request lets a grammar write text with: the allowed ones (None: all), but for those that stop."""

    allowed: tuple[int, ...] | None
    stops: tuple[int, ...]

    @property
    def key(self) -> str:
        parts = ((" of ", self.allowed), (" without ", self.stops or None))
        ids = ((name, np.unique(np.asarray(ids, np.int64))) for name, ids in parts if ids is not None)
        return "".join(name + hashlib.sha256(array.tobytes()).hexdigest() for name, array in ids)

    @property
    def names(self) -> str:
        """Of the fields, for messages."""
        return " and ".join(["allowed_token_ids"] * (self.allowed is not None) + ["stop_token_ids"] * bool(self.stops))

    def of(self, vocabulary: TokenVocabulary) -> TokenVocabulary:
        """What is left of a vocabulary; itself if that is all of it: most ids that stop spell nothing."""
        usable = np.full(vocabulary.size, self.allowed is None)
        usable[list(self.allowed or ())] = True
        usable[list(self.stops)] = False
        return vocabulary.only(usable)


class GrammarCompiler:
    """A cache of compiled grammars. `submit` may be called from any thread, and never waits for one.

    Args:
        make_vocabulary: gives the model's tokens, called when a grammar is first asked for (a second for 262 k tokens).
            With True, special tokens that begin calls of tools are among them.
        fits: whether the device's pools could hold some tables.
    """

    def __init__(self, make_vocabulary: Callable[[bool], TokenVocabulary], fits: Callable[[TokenTables], bool]) -> None:
        self._make_vocabulary = make_vocabulary
        self._fits = fits
        self._lock = threading.Lock()  # of the four below, held for moments only
        self._known: collections.OrderedDict[str, concurrent.futures.Future[CompiledGrammar]] = (
            collections.OrderedDict()
        )
        self._bytes: dict[str, int] = {}
        self._total_bytes = 0
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._making = threading.RLock()  # of the next four, held while one is made: nobody makes it twice
        self._vocabularies: dict[bool, TokenVocabulary] = {}
        self._stop_ids: tuple[int, ...] = ()  # of requests that ask for no others
        self._host: HostGrammars | None = None
        self._choices = functools.lru_cache(NUM_CHOICES)(self._choice)  # alone it would make one twice in two threads

    @property
    def vocabulary(self) -> TokenVocabulary:
        """Without end ids in masks: what ends an output is decided by each request."""
        return self._vocabulary(for_tools=False)

    def _vocabulary(self, *, for_tools: bool) -> TokenVocabulary:
        with self._making:
            if for_tools not in self._vocabularies:
                whole = self._make_vocabulary(for_tools)
                made, self._stop_ids = dataclasses.replace(whole, end_ids=(), templates={}), whole.end_ids
                _ = made.trie, made.ranked_ids  # now: later two threads would make each of them
                self._vocabularies[for_tools] = made
            return self._vocabularies[for_tools]

    def _choose(self, words: Words, for_tools: bool) -> TokenVocabulary:
        with self._making:
            return self._choices(words, for_tools)

    def _choice(self, words: Words, for_tools: bool) -> TokenVocabulary:
        return words.of(self._vocabulary(for_tools=for_tools))

    def _host_grammars(self) -> HostGrammars:
        with self._making:
            if self._host is None:
                vocabulary = self.vocabulary
                self._host = HostGrammars(vocabulary, self._stop_ids)
                _ = self._host.tokenizer
            return self._host

    def submit(
        self, form: Form, allowed_token_ids: tuple[int, ...] | None = None, stop_token_ids: tuple[int, ...] = ()
    ) -> "concurrent.futures.Future[CompiledGrammar]":
        """A compiled grammar, maybe later; errors are `RequestError`s.

        Text that the grammar forces is only written as the model's tokenizer writes it, see `forced`, unless some tokens
        must not be used.

        Args:
            form: what outputs look like.
            allowed_token_ids: the only tokens to write them with; None is all. They are part of the grammar, so that no
                output can get stuck between the two.
            stop_token_ids: tokens not to write them with, because they end an output.
        """
        words = Words(allowed_token_ids, stop_token_ids)
        key = form.key + words.key
        return self._submit(key, lambda: self._compile(key, form, words))

    def watch_json(self) -> "concurrent.futures.Future[CompiledGrammar]":
        """Free text that may not end before it holds a complete JSON object or array."""

        def make() -> CompiledGrammar:
            vocabulary = self.vocabulary
            return OnHost("watch_json", lambda: JsonWatch(vocabulary))

        return self._submit("watch_json", make)

    def _submit(self, key: str, make: Callable[[], CompiledGrammar]) -> "concurrent.futures.Future[CompiledGrammar]":
        with self._lock:
            future = self._known.get(key)
            if future is None or (future.done() and future.exception() is not None):
                if self._pool is None:
                    self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "jaxkv-grammar")
                future = self._known[key] = self._pool.submit(make)
            self._known.move_to_end(key)
        return future

    def _compile(self, key: str, form: Form, words: Words) -> CompiledGrammar:
        try:
            return self._on_device(key, form, words)
        except (TooLarge, UnsupportedSchema) as error:
            reason = error
        try:
            return self._on_host(key, form, words, reason)
        except RequestError:
            if not isinstance(form, JsonSchema | ToolCalls | Triggered):
                raise
            try:  # neither takes it whole: less of it
                return self._on_device(key, form, words, shallow=True)
            except RequestError:
                pass  # the first reason says more
            raise

    def _on_device(self, key: str, form: Form, words: Words, *, shallow: bool = False) -> OnDevice:
        automaton = to_automaton(form, shallow=shallow)
        if automaton.is_empty:
            raise RequestError(f"{form.kind}: no text fulfils it")
        for_tools = isinstance(form, ToolCalls)
        vocabulary = self._choose(words, for_tools)
        try:
            tables = build_tables(automaton, vocabulary, canonical=True)
        except TooLarge:
            raise
        except RequestError as error:
            if vocabulary is self._vocabulary(for_tools=for_tools):
                raise
            raise RequestError(f"{words.names}: {error}") from error
        if not self._fits(tables):
            raise TooLarge(f"the tables of {tables.nbytes:,} bytes exceed the device's pools")
        self._keep(key, tables.nbytes)
        return OnDevice(key, tables)

    def _on_host(self, key: str, form: Form, words: Words, reason: RequestError) -> CompiledGrammar:
        if self._choose(words, False) is not self.vocabulary:
            raise RequestError(
                f"{form.kind} with {words.names}: only grammars that fit the device can be combined with them; {reason}"
            ) from reason
        try:
            return OnHost(key, self._host_grammars().matcher(form))
        except RequestError as error:
            if isinstance(reason, UnsupportedSchema):
                raise reason from error
            raise

    def _keep(self, key: str, num_bytes: int) -> None:
        """Books tables; those unused for longest go when there are too many."""
        with self._lock:
            self._total_bytes += num_bytes - self._bytes.get(key, 0)
            self._bytes[key] = num_bytes
            for other in [*self._known]:
                if self._total_bytes <= CACHE_BYTES:
                    break
                if other != key and other in self._bytes:
                    del self._known[other]
                    self._total_bytes -= self._bytes.pop(other)

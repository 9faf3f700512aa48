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
from jaxkv.grammar.restrict import restrict
from jaxkv.grammar.tables import TokenTables, build_tables
from jaxkv.grammar.vocabulary import TokenVocabulary
from jaxkv.structured import Form, JsonSchema, ToolCalls, Triggered

CACHE_BYTES = 512 << 20  # of tables kept for requests to come
NUM_THREADS = 2


class GrammarCompiler:
    """A cache of compiled grammars. `submit` may be called from one thread, its futures are filled by others.

    Args:
        make_vocabulary: gives the model's tokens, called when a grammar is first asked for (a second for 262 k tokens).
            With True, special tokens that begin calls of tools are among them.
        fits: whether the device's pools could hold some tables.
    """

    def __init__(self, make_vocabulary: Callable[[bool], TokenVocabulary], fits: Callable[[TokenTables], bool]) -> None:
        self._make_vocabulary = make_vocabulary
        self._fits = fits
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[str, concurrent.futures.Future[CompiledGrammar]] = (
            collections.OrderedDict()
        )
        self._bytes: dict[str, int] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    @functools.cached_property
    def vocabulary(self) -> TokenVocabulary:
        """Without end ids in masks: what ends an output is decided by each request."""
        return dataclasses.replace(self._make_vocabulary(False), end_ids=(), templates={})

    @functools.cached_property
    def tool_vocabulary(self) -> TokenVocabulary:
        """For calls of tools."""
        return dataclasses.replace(self._make_vocabulary(True), end_ids=(), templates={})

    @functools.cached_property
    def _host(self) -> HostGrammars:
        return HostGrammars(self.vocabulary)

    def submit(
        self, form: Form, allowed_token_ids: tuple[int, ...] | None = None
    ) -> "concurrent.futures.Future[CompiledGrammar]":
        """A compiled grammar, maybe later; errors are `RequestError`s.

        Args:
            form: what outputs look like.
            allowed_token_ids: the only tokens to write them with; None is all. They are part of the grammar, so that no
                output can get stuck between the two.
        """
        key = form.key
        if allowed_token_ids is not None:
            ids = np.unique(np.asarray(allowed_token_ids, np.int64))
            key += f" of {hashlib.sha256(ids.tobytes()).hexdigest()}"
        vocabulary = self.tool_vocabulary if isinstance(form, ToolCalls) else self.vocabulary
        with self._lock:
            future = self._known.get(key)
            if future is None or (future.done() and future.exception() is not None):
                if self._pool is None:
                    self._pool = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "jaxkv-grammar")
                future = self._known[key] = self._pool.submit(self._compile, key, form, vocabulary, allowed_token_ids)
            self._known.move_to_end(key)
        return future

    def watch_json(self) -> OnHost:
        """Free text that may not end before it holds a complete JSON object or array."""
        return OnHost("watch_json", lambda: JsonWatch(self.vocabulary))

    def _compile(
        self, key: str, form: Form, vocabulary: TokenVocabulary, allowed: tuple[int, ...] | None
    ) -> CompiledGrammar:
        try:
            return self._on_device(key, form, vocabulary, allowed)
        except (TooLarge, UnsupportedSchema) as error:
            reason = error
        try:
            return self._on_host(key, form, allowed, reason)
        except RequestError:
            if not isinstance(form, JsonSchema | ToolCalls | Triggered):
                raise
            try:  # neither takes it whole: less of it
                return self._on_device(key, form, vocabulary, allowed, shallow=True)
            except RequestError:
                pass  # the first reason says more
            raise

    def _on_device(
        self,
        key: str,
        form: Form,
        vocabulary: TokenVocabulary,
        allowed: tuple[int, ...] | None,
        *,
        shallow: bool = False,
    ) -> OnDevice:
        automaton = to_automaton(form, shallow=shallow)
        if automaton.is_empty:
            raise RequestError(f"{form.kind}: no text fulfils it")
        tables = build_tables(automaton, vocabulary)
        if allowed is not None:
            tables = restrict(tables, allowed)
        if not self._fits(tables):
            raise TooLarge(f"the tables of {tables.nbytes:,} bytes exceed the device's pools")
        self._keep(key, tables.nbytes)
        return OnDevice(key, tables)

    def _on_host(self, key: str, form: Form, allowed: tuple[int, ...] | None, reason: RequestError) -> CompiledGrammar:
        if allowed is not None:
            raise RequestError(
                f"{form.kind} with allowed_token_ids: only grammars that fit the device can be combined with them; {reason}"
            ) from reason
        try:
            return OnHost(key, self._host.matcher(form))
        except RequestError as error:
            if isinstance(reason, UnsupportedSchema):
                raise reason from error
            raise

    def _keep(self, key: str, num_bytes: int) -> None:
        """Books tables; those unused for longest go when there are too many."""
        with self._lock:
            self._bytes[key] = num_bytes
            for other in list(self._known):
                if sum(self._bytes.values()) <= CACHE_BYTES:
                    break
                if other != key and other in self._bytes:
                    del self._known[other], self._bytes[other]

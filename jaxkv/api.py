"""`LLM`: load a model, generate, chat, stream, score."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxkv.build import build_engine
from jaxkv.cache_control import CacheControl, Caching, ttl_s
from jaxkv.chat_cache import read_marks
from jaxkv.device.settings import EngineConfig
from jaxkv.errors import RequestError
from jaxkv.explain import Explanation, explain_live
from jaxkv.outputs import OutputBuilder
from jaxkv.progress import Progress
from jaxkv.request import RequestOutput, SamplingParams
from jaxkv.request_loop import Prompt, RequestLoop
from jaxkv.request_loop import Stats as Stats
from jaxkv.saving import SavedPrefix, save_prefix
from jaxkv.sessions.session import Session
from jaxkv.sessions.transcript import ChatTranscript, TextTranscript
from jaxkv.stream import TextStream

Each = TypeVar("Each")


class LLM(RequestLoop):
    """A loaded model and its engine. Not thread-safe; generators of `stream` may interleave.

    Build it with `LLM.load`. The base class has the loop by hand, for servers.
    """

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        quant: str | None = None,
        max_len: int | None = None,
        max_rows: int | None = None,
        kv_dtype: str = "auto",
        page_size: int = 16,
        num_pages: int | None = None,
        memory_fraction: float | None = None,
        token_budget: int | None = None,
        decode_steps: int | None = None,
        prefix_cache: bool = True,
        eviction: str = "lru",
        host_cache_bytes: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        disk_cache_bytes: int | None = None,
        demote: str = "retained",
        overlap: bool = True,
        grammar_bytes: int | None = None,
        seed: int = 0,
        tensor: int = 1,
        data: int = 1,
        warm_up: bool = False,
        progress: bool | None = None,
    ) -> "LLM":
        """Loads a model and preallocates its page pool.

        Args:
            model: "smollm2" or "gemma3-270m" (packages), a Hugging Face folder, a .gguf file, a folder written by
                `jaxkv convert`, or a hub id.
            dtype: of weights and activations: "float32", "bfloat16", or "auto" (float32 on CPUs, elsewhere the
                checkpoint's; bfloat16 for quantised ones).
            quant: None keeps weights in `dtype`; "int8" rounds the matrices of attention, MLP and experts, and a head that is
                not tied to the embedding, to int8 with a scale for each output channel: about half of bfloat16's memory.
            max_len: tokens a sequence may hold; None is what the model was trained for.
            max_rows: sequences running at once; a multiple of `data`.
            kv_dtype: of K/V in the page pool: "auto" (`dtype`), "float32", "bfloat16", or "float8_e4m3fn", which holds twice
                the tokens of bfloat16 and rounds them.
            page_size: tokens per page.
            num_pages: pages in the pool, each for all layers, a multiple of `data`; None takes `memory_fraction` of the free
                memory. One sequence lives on one data shard, which has its share of rows and pages.
            memory_fraction: share of free memory for the pool.
            token_budget: prompt tokens that a data shard computes in a step, beside decode rows; smaller keeps streams
                smoother.
            decode_steps: tokens a sequence makes in one device loop when nothing waits.
            prefix_cache: reuse the pages of equal prompt beginnings.
            eviction: which cached pages go first when memory is needed: "lru", those not used for longest; "cost",
                those that are cheapest to compute again for their age; "adaptive", these or, where more prefixes take
                turns than there is room for, the newest.
            host_cache_bytes: host memory for cached pages that the pool has no room for; a hit brings them back. With it or
                `cache_dir`, what left sliding windows stays in the pool as long as the request runs.
            cache_dir: folder for those that host memory has no room for, and for `save_prefix`; later processes with
                this model find them there. None: no disk is used.
            disk_cache_bytes: budget of this model's pages in `cache_dir`; None is 10 GiB.
            demote: which cached pages go down when the pool gives them up: "retained", those somebody asked to keep
                (`cache_control`, `prompt_cache_retention`) and those of open sessions, or "all".
            overlap: dispatch a step before the previous one was read; never changes the tokens.
            grammar_bytes: memory of each device for the tables of structured outputs; None is 38 MB for a vocabulary of 49k,
                100 MB for 128k. What does not fit is matched on the host.
            seed: base for requests without a seed of their own.
            tensor: devices over which weights and K/V heads are split; K/V heads are copied where there are fewer.
            data: groups of `tensor` devices, each with all weights, over which the sequences are split.
            warm_up: compile all programs now; otherwise each is compiled when first needed.
            progress: show progress bars on stderr; None shows them on a terminal only.

        Raises:
            CheckpointError: the model is missing, damaged or of an unknown kind.
            ConfigError: a setting is impossible.
            CapacityError: weights or pool do not fit.
        """
        config = EngineConfig(
            max_len=max_len, max_rows=max_rows, kv_dtype=kv_dtype, page_size=page_size, num_pages=num_pages,
            memory_fraction=memory_fraction, token_budget=token_budget, decode_steps=decode_steps,
            prefix_cache=prefix_cache, eviction=eviction, host_cache_bytes=host_cache_bytes,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir), disk_cache_bytes=disk_cache_bytes,
            demote=demote, overlap=overlap, grammar_bytes=grammar_bytes, seed=seed,
        )  # fmt: skip
        engine, intake = build_engine(
            model, config, dtype=dtype, quant=quant, tensor=tensor, data=data, progress=progress
        )
        llm = cls(str(model), engine, intake, config)
        if warm_up:
            llm.warm_up(progress=progress)
        return llm

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compiles every program for every shape it can meet; afterwards nothing compiles again."""
        with Progress("compiling", total=self._engine.runner.num_programs, unit="programs", show=progress) as bar:
            self._engine.runner.warm_up(lambda: bar.advance(1))

    def clear_prefix_cache(self) -> None:
        """Forgets every cached page, in the pool and in host memory; files in `cache_dir` stay (`jaxkv cache rm`)."""
        self._engine.scheduler.clear_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        priority: int = 0,
        cache_salt: str = "",
        cache_control: CacheControl | Sequence[CacheControl | None] | None = None,
        prompt_cache_key: str | None = None,
        prompt_cache_retention: str | None = None,
        timeout_s: float | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[RequestOutput]:
        """Generates for all prompts, batched continuously.

        Args:
            prompts: one text, or a list of texts and token-id lists.
            params: for all prompts, or one for each; None is `SamplingParams()`.
            progress: show a bar on stderr; None shows it on a terminal only, False never.
            priority: lower runs first.
            cache_salt: prompts under different salts never share pages.
            cache_control: keeps prompts up to its breakpoints, in tokens, for its time to live; for all prompts, or one
                for each.
            prompt_cache_key: requests with one key run next to each other, and on one data shard where they can.
            prompt_cache_retention: "24h" keeps the whole prompts that long after their last use; "in_memory", as None,
                for as long as there is room. Not together with `cache_control`.
            timeout_s: seconds after which a request ends with what it has.
            on_step: called after each engine step, to look at `stats` for instance.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or a parameter is refused; nothing of this call runs.
            CapacityError: a prompt can never fit.
        """
        asked = _as_list(prompts)
        controls = _one_for_each(asked, cache_control, "CacheControl")
        items = [
            (prompt, Caching(salt=cache_salt, key=prompt_cache_key, retention=prompt_cache_retention, control=control))
            for prompt, control in zip(asked, controls, strict=True)
        ]
        return self._run(items, params, progress, priority, timeout_s, on_step)

    def _run(
        self,
        items: list[tuple[Prompt, Caching]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        priority: int,
        timeout_s: float | None,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[RequestOutput]:
        each = _one_for_each(items, params or SamplingParams(), "SamplingParams")
        each = [self._intake.resolve(one) for one in each]
        builders: list[OutputBuilder] = []
        try:
            for (prompt, caching), one in zip(items, each, strict=True):
                builders.append(self._submit(prompt, one, priority, caching, timeout_s, stream=False, settle=False))
            for builder in builders:
                self._settle(builder, on_step)
            with Progress("generating", total=len(builders), unit="requests", show=progress) as bar:
                pending = builders
                while pending:
                    before = self._engine.num_unfinished
                    self._engine.step()
                    on_step()
                    if self._engine.num_unfinished != before or not before:
                        num_pending = len(pending)
                        pending = [builder for builder in pending if builder.output is None]
                        bar.advance(num_pending - len(pending))
        except BaseException:  # also KeyboardInterrupt: pages come back
            self._abort(builders)
            raise
        return [builder.output for builder in builders if builder.output is not None]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        cache_control: CacheControl | None = None,
        prompt_cache_key: str | None = None,
        prompt_cache_retention: str | None = None,
        timeout_s: float | None = None,
    ) -> TextStream:
        """An iterator over the text of one completion as it grows; the pieces join to `generate`'s text.

        Closing or dropping it cancels the request.

        Raises:
            RequestError: the request is refused, or asks for several completions.
            CapacityError: the prompt can never fit.
        """
        params = self._intake.resolve(params or SamplingParams())
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream carries one completion; use generate")
        caching = Caching(
            salt=cache_salt, key=prompt_cache_key, retention=prompt_cache_retention, control=cache_control
        )
        return TextStream(self._engine, self._submit(prompt, params, priority, caching, timeout_s, stream=True))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
        priority: int = 0,
        cache_salt: str = "",
        cache_control: CacheControl | None = None,
        prompt_cache_key: str | None = None,
        prompt_cache_retention: str | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, through the model's own chat template.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first. `"cache_control": {"type": "ephemeral", "ttl": "1h"}`
                on a message, or on a part of its content, keeps the prompt up to its end (see `jaxkv.chat_cache`).
            params: as in `generate`.
            tools: function schemas the template shows to the model; `cache_control` on one keeps the tools up to it.
            progress: as in `generate`; so are `priority`, `cache_salt`, `prompt_cache_key`, `prompt_cache_retention`
                and `timeout_s`.
            cache_control: as in `generate`, but its breakpoints are indices of messages.

        Raises:
            RequestError: as in `generate`; or there are more than four breakpoints, or they are out of order.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        items: list[tuple[Prompt, Caching]] = []
        for conversation in conversations:
            asked = Caching(
                salt=cache_salt, key=prompt_cache_key, retention=prompt_cache_retention, control=cache_control
            )
            token_ids, caching = self.lay_out_chat(conversation, tools, asked)  # type: ignore[arg-type]
            items.append((token_ids, caching))
        return self._run(items, params, progress, priority, timeout_s)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; `cache_control` in it is left out.

        Raises:
            RequestError: as `chat`.
        """
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; pass token ids to generate")
        chat = read_marks(messages, tools)
        return self.tokenizer.encode_chat(chat.messages, tools=chat.tools)

    def session(
        self,
        prefix: Prompt | Sequence[Mapping[str, Any]] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
        prompt_cache_key: str | None = None,
    ) -> Session:
        """Begins a session: a prompt that grows by turns, forks and can be cut, and keeps its pages while it is open.

        Args:
            prefix: its beginning: text, token ids, or the messages of a chat. Nothing is computed yet.
            tools: in a chat, as in `chat`.
            cache_salt: as in `generate`, for all its turns; so is `prompt_cache_key`.

        Raises:
            RequestError: the prefix is malformed, or is no text and there is no tokenizer or chat template for it.
        """
        caching = Caching(salt=cache_salt, key=prompt_cache_key)
        if not isinstance(prefix, str) and len(prefix) and not isinstance(prefix[0], (int, np.integer)):
            transcript = ChatTranscript(self.tokenizer, prefix, tools)  # type: ignore[arg-type]
        elif tools is not None:
            raise RequestError("tools are laid out by a chat template; begin the session with messages")
        else:
            transcript = TextTranscript(self.tokenizer)
            transcript.append(prefix)  # type: ignore[arg-type]
        return Session(self._engine, self._submit, transcript, caching)

    def score(self, prompts: Prompt | Sequence[Prompt], *, top: int = 0) -> list[RequestOutput]:
        """Log-probabilities of the prompts' own tokens, without generating: see `RequestOutput.prompt_logprobs`."""
        return self.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=top))

    def save_prefix(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
        ttl: str | float | None = None,
    ) -> SavedPrefix:
        """Writes the pages of a prompt into `cache_dir` now, computing what is not cached; waits until they are there.

        Args:
            prompt: text, token ids, or messages as `chat` takes them.
            tools: as in `chat`, with messages.
            cache_salt: only requests under this salt find them.
            ttl: keeps them on disk for so long from their last use on, as in `CacheControl`; None: while there is room.

        Raises:
            RequestError: the prompt is refused, or there is no `cache_dir`.
            CapacityError: not all pages could be written.
        """
        is_chat = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        token_ids = self.chat_prompt(prompt, tools=tools) if is_chat else self._encode(prompt)  # type: ignore[arg-type]
        request = self._intake.make_request(
            "saved", token_ids, SamplingParams(max_tokens=1), seed=0, cache_salt=cache_salt
        )
        compute = functools.partial(self.generate, [request.prompt_token_ids], request.params, cache_salt=cache_salt)
        return save_prefix(self._engine, request, compute, None if ttl is None else ttl_s(ttl))

    def explain_cache(self, request: Any, previous: Any = None) -> Explanation:
        """Why a request missed the prefix cache, or would: runs nothing, changes nothing.

        `print(jaxkv.explain.to_text(explanation))` writes it out.

        Args:
            request: OpenAI's JSON, `{"messages": [...], "tools": [...], "cache_salt": ...}` or `{"prompt": ...}` (see
                `jaxkv.explain.parse_ask`), or only the messages, the text or the token ids.
            previous: the request that ran before, to say where the two differ. None looks the request's pages up in
                the cache and says how many of them are there now.

        Raises:
            RequestError: a request is malformed, or the chat template refuses it.
        """
        return explain_live(request, previous, scheduler=self._engine.scheduler, intake=self._intake)

    def _abort(self, builders: list[OutputBuilder]) -> None:
        for builder in builders:
            if builder.output is None:
                self._engine.abort(builder.request.request_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]  # type: ignore[list-item]  (one prompt of token ids)
    return items  # type: ignore[return-value]


def _one_for_each(prompts: Sequence[object], value: Each | Sequence[Each], name: str) -> Sequence[Each]:
    if not isinstance(value, (list, tuple)):
        return [value] * len(prompts)  # type: ignore[list-item]
    if len(value) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(value)} {name}; give one for all or one for each")
    return value

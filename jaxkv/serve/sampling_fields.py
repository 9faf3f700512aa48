"""The fields that OpenAI's routes share, and how they become `SamplingParams` and `Caching`."""

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from jaxkv.cache_control import CacheControl, Caching
from jaxkv.request import SamplingParams
from jaxkv.serve.errors import ApiError
from jaxkv.serve.fields import Fields, Refused

# Of both APIs, with the names vLLM gives to what OpenAI does not have; each is the field of `SamplingParams`.
_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "n",
    "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "allowed_token_ids", "bad_words",
)  # fmt: skip

Stops = str | list[str]
Seconds = Annotated[float, pydantic.Field(gt=0, le=10**9)]


class StreamOptions(Fields):
    """What a stream says besides its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # hides lengths from eavesdroppers; jaxkv does not pad


class SamplingFields(Fields):
    """What chats and completions share."""

    model: str | None = None  # None: the one that is served
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: Stops | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # goes into the log line of the request
    # Not in OpenAI's API, named as in vLLM's:
    top_k: int | None = None  # also -1 keeps all
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    return_tokens_as_token_ids: bool = False  # log-probabilities name tokens "token_id:17", which no two tokens share
    priority: int = 0  # lower runs first
    timeout: Seconds | None = None  # seconds after which the answer ends with what it has
    cache_salt: str = ""
    # OpenAI's and Anthropic's words on the prompt cache:
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_control: dict[str, Any] | None = None  # of the whole prompt; chats have it also on messages and parts

    refused: ClassVar[dict[str, Refused]] = {
        "service_tier": Refused("there is one tier", ("auto", "default")),
        "metadata": Refused("answers are not stored, so there is nothing to attach it to"),
    }

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def caching(self) -> Caching:
        """What is asked of the prefix cache.

        Raises:
            RequestError: it contradicts itself.
        """
        control = None
        if self.cache_control is not None:
            mark = dict(self.cache_control)
            if mark.pop("type", "ephemeral") != "ephemeral" or mark.keys() - {"ttl"}:
                raise ApiError(400, "cache_control must be {'type': 'ephemeral'}, with a 'ttl'", param="cache_control")
            control = CacheControl(**mark)
        retention = self.prompt_cache_retention
        if retention == "in-memory":  # OpenAI's clients know both spellings
            retention = "in_memory"
        return Caching(salt=self.cache_salt, key=self.prompt_cache_key, retention=retention, control=control)

    def sampling(self, **changes: Any) -> SamplingParams:
        """The sampling parameters; `changes` are those that the routes spell differently.

        Raises:
            RequestError: one is out of range.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        fields = {name: value for name in _AS_THEY_ARE if (value := getattr(self, name)) is not None}
        if fields.get("top_k") == -1:
            fields["top_k"] = 0
        if self.stop:
            fields["stop"] = self.stop
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**fields, **changes)


def _token_id(key: str) -> int:
    """A key of `logit_bias`, which JSON makes text."""
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise ApiError(400, f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
    return int(key)

"""The fields of OpenAI's routes: chats, completions, and vLLM's two for tokens."""

from typing import Annotated, Any, ClassVar

import pydantic

from jaxkv.request import SamplingParams
from jaxkv.serve.errors import ApiError
from jaxkv.serve.fields import Fields, Refused
from jaxkv.serve.forms import read_form
from jaxkv.serve.sampling_fields import SamplingFields

MAX_PROMPTS = 1024  # in one request
Ids = list[int]


class Message(Fields):
    """One message of a chat. `content` is checked by the chat template's reader, which knows what parts it takes."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    cache_control: dict[str, Any] | None = None
    # What clients send back out of an earlier answer:
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], pydantic.Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """As `ChatTemplate.render` takes it."""
        return self.model_dump(exclude_none=True, exclude={"annotations"})


class ChatFields(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], pydantic.Field(min_length=1)]
    max_completion_tokens: int | None = None  # OpenAI's newer name of max_tokens; the default is all there is room for
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None  # as `user`, which it replaces
    # vLLM's:
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True

    refused: ClassVar[dict[str, Refused]] = {
        **SamplingFields.refused,
        "audio": Refused("the models here write text"),
        "modalities": Refused("the models here write text", (["text"],)),
        "prediction": Refused("there is no speculative decoding", ({},)),
        "store": Refused("answers are not stored", (False,)),
        "web_search_options": Refused("the server has no web search"),
        "moderation": Refused("there is no moderation"),
        "reasoning_effort": Refused("send what the model's chat template reads in chat_template_kwargs", ("none",)),
        "verbosity": Refused("the models here do not know it", ("medium",)),
        "functions": Refused("it is the old form of tools; send tools", ([],)),
        "function_call": Refused("it is the old form of tool_choice; send tools and tool_choice", ("none",)),
        "prompt_cache_options": Refused("say it with prompt_cache_retention, or cache_control on messages and parts"),
        "chat_template": Refused("templates of clients are not run"),
        "continue_final_message": Refused("send the whole text to /v1/completions", (False,)),
    }

    def params(self, room: int) -> SamplingParams:
        """The sampling parameters.

        Args:
            room: tokens an answer may have at most, without max_tokens.

        Raises:
            RequestError: a field is out of range.
            ApiError: two fields contradict each other.
        """
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != max_tokens:
            message = f"max_tokens={self.max_tokens} and max_completion_tokens={max_tokens} differ; give one"
            raise ApiError(400, message, param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        form = read_form(self.response_format, self.tools, self.tool_choice, self.parallel_tool_calls)
        return self.sampling(
            max_tokens=max(room, 1) if max_tokens is None else max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **({} if form is None else {"structured": form}),
        )

    def layout(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.encode_chat`."""
        return dict(
            documents=self.documents,
            variables=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
        )


class CompletionFields(SamplingFields):
    """POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids]
    echo: bool = False  # the answer begins with the prompt, whose tokens have log-probabilities too
    logprobs: int | None = None
    best_of: int | None = None

    refused: ClassVar[dict[str, Refused]] = {
        **SamplingFields.refused,
        "suffix": Refused("the models here do not fill in the middle", ("",)),
    }

    @property
    def prompts(self) -> list[str] | list[Ids]:
        """One or several; at least one, with something in each of those of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is an empty list; it needs at least one token or text", param="prompt")
        if isinstance(prompt[0], int):
            return [prompt]  # pyright: ignore[reportReturnType]
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt has {len(prompt)} entries; the limit is {MAX_PROMPTS}", param="prompt")
        return prompt  # pyright: ignore[reportReturnType]

    def params(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            RequestError: a field is out of range.
            ApiError: two fields contradict each other.
        """
        if self.best_of not in (None, self.n or 1):
            message = f"best_of={self.best_of} is not supported: all completions are returned; send n"
            raise ApiError(400, message, param="best_of")
        if self.echo and self.stream and self.logprobs is not None:
            message = "echo with stream and logprobs is not supported: leave one of them out"
            raise ApiError(400, message, param="echo")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        # An echoed prompt is scored where log-probabilities are wanted, or where there is nothing else to do with it.
        scored = self.echo and (self.logprobs is not None or max_tokens == 0)
        return self.sampling(
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            **({"prompt_logprobs": self.logprobs or 0} if scored else {}),
        )


class TokenizeFields(Fields):
    """POST /tokenize: a text, or a chat as it would be laid out."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], pydantic.Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False

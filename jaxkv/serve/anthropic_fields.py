"""The fields of Anthropic's routes, and the chat that they spell in the words of chat templates."""

from typing import Annotated, Any, ClassVar, Literal

import pydantic

from jaxkv.cache_control import CacheControl, Caching
from jaxkv.request import SamplingParams
from jaxkv.serve.anthropic_messages import chat_messages
from jaxkv.serve.errors import ApiError
from jaxkv.serve.fields import Fields, Refused
from jaxkv.serve.forms import read_form
from jaxkv.serve.sampling_fields import Seconds

Mark = dict[str, Any]
Blocks = list[dict[str, Any]]


class Message(Fields):
    """One message; its blocks are checked where they are turned into a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(Fields):
    """A function of the client's."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Mark | None = None
    # Where clients send what Anthropic's server takes for the default:
    defer_loading: Literal[False] | None = None
    eager_input_streaming: Literal[False] | None = None

    def openai(self) -> dict[str, Any]:
        """As chat templates know tools."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        tool: dict[str, Any] = {"type": "function", "function": function}
        return tool if self.cache_control is None else {**tool, "cache_control": self.cache_control}


class ToolChoice(Fields):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Fields):
    """What the answer must look like."""

    format: dict[str, Any] | None = None
    effort: None = None


class Metadata(Fields):
    user_id: str | None = None  # goes into the log line of the request


class CountFields(Fields):
    """POST /v1/messages/count_tokens: what decides the prompt."""

    model: str
    messages: Annotated[list[Message], pydantic.Field(min_length=1)]
    system: str | Blocks | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: Mark | None = None  # keeps all of the prompt
    output_config: OutputConfig | None = None

    refused: ClassVar[dict[str, Refused]] = {
        "container": Refused("the server has no containers"),
        "context_management": Refused("the context is the client's", ({"edits": []},)),
        "diagnostics": Refused("it is for Anthropic's own server"),
        "inference_geo": Refused("the model runs where the server is"),
        "mcp_servers": Refused("the server calls no other servers", ([],)),
        "service_tier": Refused("there is one tier", ("auto", "standard_only")),
        "speed": Refused("there is one speed", ("standard",)),
        "thinking": Refused("whether a model reasons is up to its chat template", ({"type": "disabled"},)),
        "user_profile_id": Refused("the server keeps no profiles"),
        "workspace_id": Refused("the server has no workspaces"),
    }

    def chat(self) -> list[dict[str, Any]]:
        """The messages as chat templates know them, with `cache_control` where it was.

        Raises:
            ApiError: a block is of a kind that is not supported.
        """
        messages = [(message.role, message.content) for message in self.messages]
        if messages[-1][0] == "assistant":
            text = (
                "the last message is the assistant's; beginning its answer for it is not supported: end with a user's"
            )
            raise ApiError(400, text, param="messages")
        return chat_messages(self.system, messages)

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of, in the form of chat templates."""
        if not self.tools or (self.tool_choice is not None and self.tool_choice.type == "none"):
            return None
        return [tool.openai() for tool in self.tools]

    def caching(self) -> Caching:
        """What is asked of the prefix cache, besides marks within the prompt."""
        return Caching(control=self.control())

    def control(self) -> CacheControl | None:
        """Raises ApiError if `cache_control` is malformed."""
        if self.cache_control is None:
            return None
        mark = dict(self.cache_control)
        if mark.pop("type", None) != "ephemeral" or mark.keys() - {"ttl"}:
            raise ApiError(400, "cache_control must be {'type': 'ephemeral'}, with a 'ttl'", param="cache_control")
        return CacheControl(**mark)


class MessagesFields(CountFields):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, pydantic.Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    # Not in Anthropic's API:
    seed: int | None = None
    cache_salt: str = ""
    priority: int = 0
    timeout: Seconds | None = None

    def caching(self) -> Caching:
        return Caching(control=self.control(), salt=self.cache_salt)

    def params(self) -> SamplingParams:
        """The sampling parameters.

        Raises:
            RequestError: a field is out of range.
            ApiError: a field contradicts another.
        """
        fields: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "top_k", "seed")
            if (value := getattr(self, name)) is not None
        }
        wanted = self.output_config.format if self.output_config is not None else None
        if wanted is not None:  # OpenAI's form of the same
            wanted = {"type": "json_schema", "json_schema": {"schema": wanted.get("schema"), "strict": True}}
        parallel = None if self.tool_choice is None else self.tool_choice.disable_parallel_tool_use
        form = read_form(wanted, self.shown_tools(), self._choice(), None if parallel is None else not parallel)
        if form is not None:
            fields["structured"] = form
        return SamplingParams(max_tokens=self.max_tokens, stop=tuple(self.stop_sequences or ()), **fields)

    def _choice(self) -> str | dict[str, Any] | None:
        """`tool_choice` in OpenAI's words."""
        if self.tool_choice is None:
            return None
        if self.tool_choice.type == "tool":
            if self.tool_choice.name is None:
                raise ApiError(400, "tool_choice of type tool needs a name", param="tool_choice.name")
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.tool_choice.type]

"""OpenAI's answers, from `RequestOutput`."""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from jaxkv.detokenizer import Detokenizer
from jaxkv.request import Completion, FinishReason, RequestOutput, TokenLogprobs
from jaxkv.serve.errors import ApiError
from jaxkv.tokenizer import Tokenizer
from jaxkv.tool_formats import text_beside_calls


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What all chunks of an answer begin with."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts of a request; those of the cache are always there, also 0."""
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.cached_tokens for output in outputs),
            "cache_write_tokens": sum(output.cache_written_tokens for output in outputs),
        },
    }


def check_outputs(outputs: Iterable[RequestOutput]) -> None:
    """Raises ApiError, 500, if the engine could not go on with one."""
    for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason is FinishReason.ERROR:
                raise ApiError(500, completion.error or "the engine could not go on with this request")


def tool_calls(completion: Completion) -> list[dict[str, Any]]:
    """The calls in an answer."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in completion.tool_calls
    ]


def message(completion: Completion) -> dict[str, Any]:
    """The message of a chat's answer."""
    text = text_beside_calls(completion)
    if calls := tool_calls(completion):
        return {"role": "assistant", "content": text or None, "refusal": None, "tool_calls": calls}
    return {"role": "assistant", "content": text, "refusal": None}


class LogprobWriter:
    """Writes the log-probabilities of one text, whose tokens come in order.

    Args:
        tokenizer: None writes ids.
        as_ids: tokens are named "token_id:17" instead of by their text.
        skip_special_tokens: whether the text leaves special tokens out.
        continues: the text goes on from a prompt that it does not show.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, as_ids: bool, skip_special_tokens: bool, continues: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._text = (
            Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues) if tokenizer else None
        )
        self._num_chars = 0

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """As chats have them."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def legacy(self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """As completions have them; an entry is None where nothing precedes a prompt's first token.

        Args:
            entries: of the tokens, which may be fewer than the first call's.
            token_ids: of the same tokens.
        """
        offsets = []
        for token in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += 0 if self._text is None else len(self._text.feed([token]))
        return {
            "text_offset": offsets,
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest and the token itself; of two with one name the likelier counts."""
        named: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            named.setdefault(self._name(token), logprob)
        return named

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in entry.top]
        return {**self._named(entry.token_id, entry.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)
        return {"token": self._name(token), "logprob": logprob, "bytes": list(data)}

    def _name(self, token: int) -> str:
        """The token's text, or its bytes where they are no whole characters, as OpenAI spells them."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

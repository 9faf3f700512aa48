"""Requests as prompts: text and token ids, laid out at a moment that stands still."""

import dataclasses
import datetime

from jaxkv.errors import RequestError
from jaxkv.explain.ask import Ask, chat_template
from jaxkv.explain.texts import common_prefix, token_start
from jaxkv.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Layout:
    """A request and its prompt."""

    ask: Ask
    text: str | None  # None for token ids
    token_ids: tuple[int, ...]


class Layouter:
    """Lays out requests with one model's template and tokenizer.

    Args:
        tokenizer: of the model; None: token-id prompts only.
        now: the time for templates that write it, where a request does not say its own.
    """

    def __init__(self, tokenizer: Tokenizer | None, now: datetime.datetime) -> None:
        self.tokenizer = tokenizer
        self._now = now

    def lay_out(self, ask: Ask) -> Layout:
        """The prompt of a request.

        Raises:
            RequestError: the template refuses it, or there is no tokenizer.
        """
        if ask.kind == "ids":
            assert isinstance(ask.prompt, tuple)
            return Layout(ask, None, ask.prompt)
        text = self.render(ask)
        # A template decides about the BOS alone; a plain text gets the model's own.
        return Layout(
            ask, text, tuple(self._tokenizer().encode(text, add_bos=False if ask.messages is not None else None))
        )

    def render(self, ask: Ask) -> str:
        """The text of a chat or text prompt."""
        if ask.messages is None:
            assert isinstance(ask.prompt, str)
            return ask.prompt
        tokenizer = self._tokenizer()
        return chat_template(ask, tokenizer.chat_template).render(
            ask.messages,
            tools=ask.tools,
            documents=ask.documents,
            add_generation_prompt=ask.add_generation_prompt,
            special_tokens=tokenizer.special.texts,
            variables=ask.variables,
            now=ask.rendered_at or self._now,
        )

    def start_of(self, layout: Layout, index: int) -> int:
        """The character at which a token of a prompt with text begins."""
        assert layout.text is not None
        tokenizer = self._tokenizer()
        bare = tokenizer.vocabulary.encode(layout.text)
        added = len(tokenizer.special.prefix_ids)
        if common_prefix(layout.token_ids, bare) == len(bare):
            added = 0
        return token_start(tokenizer, layout.text, bare, min(max(index - added, 0), len(bare)))

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id) if self.tokenizer is not None else str(token_id)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; only prompts of token ids can be explained")
        return self.tokenizer

"""The tables of fields against what the clients' own types know: none is forgotten."""

from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jaxkv.serve.anthropic_fields import CountFields, MessagesFields
from jaxkv.serve.errors import ApiError
from jaxkv.serve.fields import Fields, check
from jaxkv.serve.openai_fields import ChatFields, CompletionFields


@pytest.mark.parametrize(
    ("model", "theirs"),
    [
        (ChatFields, chat_create_params.CompletionCreateParamsBase),
        (CompletionFields, completion_create_params.CompletionCreateParamsBase),
        (MessagesFields, message_create_params.MessageCreateParamsBase),
        (CountFields, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_of_the_clients_is_known(model: type[Fields], theirs: Any) -> None:
    known = model.model_fields.keys() | model.refused.keys()
    assert set(theirs.__annotations__) <= known
    assert not model.model_fields.keys() & model.refused.keys()
    assert get_type_hints(model)


@pytest.mark.parametrize("model", [ChatFields, CompletionFields, MessagesFields])
def test_each_refused_field_says_why(model: type[Fields]) -> None:
    for name, refused in model.refused.items():
        with pytest.raises(ApiError) as caught:
            check(model, {name: {"something": 1}}, lenient=False)
        assert caught.value.param == name and refused.why in caught.value.message
        for neutral in (None, *refused.neutral):
            with pytest.raises(ApiError) as caught:  # of the fields that are missing, not of this one
                check(model, {name: neutral}, lenient=False)
            assert caught.value.param != name


def test_false_is_not_zero() -> None:
    with pytest.raises(ApiError, match="store"):
        check(ChatFields, {"store": 0}, lenient=False)

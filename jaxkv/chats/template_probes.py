"""Small chats that chat templates are tried with: plain, with a system message, reasoning, tools and their results."""

from typing import Any


def _call(number: int) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": f"place {number}"}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "You are careful."}
TURNS = (
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "Second answer."},
    {"role": "user", "content": "Third question?"},
)
THOUGHTS = tuple(
    {**turn, "reasoning_content": "Let me think."} if turn["role"] == "assistant" else turn for turn in TURNS
)
WRITTEN_THOUGHTS = tuple(
    {**turn, "content": f"<think>\nLet me think.\n</think>\n\n{turn['content']}"}
    if turn["role"] == "assistant"
    else turn
    for turn in TURNS
)
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
    for name in ("look", "listen")
)


def _used(number: int, **more: Any) -> tuple[dict[str, Any], ...]:
    call = _call(number)
    answer = {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": f"Seen {number}."}
    return ({"role": "assistant", "content": "", "tool_calls": [call], **more}, answer)


_AGENT = (TURNS[0], *_used(1), *TURNS[1:3], *_used(2), *TURNS[3:])
_THINKING_AGENT = (TURNS[0], *_used(1, reasoning_content="Look there."), *THOUGHTS[1:])
PROBES: tuple[tuple[tuple[dict[str, Any], ...], Any], ...] = (
    (TURNS, None),
    ((SYSTEM, *TURNS), None),
    (TURNS, TOOLS),
    (THOUGHTS, None),
    (WRITTEN_THOUGHTS, None),
    ((SYSTEM, *_AGENT), TOOLS),
    (_THINKING_AGENT, TOOLS),
)

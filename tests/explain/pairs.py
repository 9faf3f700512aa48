"""Hand-made pairs of requests, each with the cause that `explain` has to name and the place where they part."""

import copy
from typing import Any

from jaxkv.explain import Cause
from tests.explain.wordings import WORDINGS
from tests.tokenizer import templates, test_chat, tiny

RULES = "You are Ada, who answers briefly and kindly. Say so when you do not know. "
LONG = "Once upon a time, there was a little girl who lived in a little house. " * 4


def tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "integer"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": parameters, **more},
    }


TOOLS = [tool("weather"), tool("clock"), tool("search")]
REORDERED = copy.deepcopy(TOOLS)
REORDERED[1]["function"] = dict(reversed(REORDERED[1]["function"].items()))


def chat(system: str | None, *turns: Any, **fields: Any) -> dict[str, Any]:
    """A request; turns are the user's and the assistant's texts in turn, or whole messages."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for index, turn in enumerate(turns):
        text = {"role": "assistant" if index % 2 else "user", "content": turn}
        messages.append(text if isinstance(turn, str) else turn)
    return {"messages": messages, **fields}


def sys(x: str, y: str, template: str = "smollm2") -> tuple[dict[str, Any], dict[str, Any], str, str]:
    """Two chats whose system prompts hold x and y."""
    a, b = (chat(f"{RULES}{text} {LONG}", LONG, "Well.", "Go on.") for text in (x, y))
    return a, b, template, "messages[0].content"


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def variable(mode: str) -> dict[str, Any]:
    return chat(RULES, LONG, chat_template="{{ mode }}\n" + tiny.CHATML, chat_template_kwargs={"mode": mode})


def counted(num_turns: int) -> dict[str, Any]:
    return chat(RULES, *TALK[:num_turns], chat_template="{{ messages | length }} messages\n" + tiny.CHATML)


RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "Rain."}
THOUGHT = {"role": "assistant", "content": "Well.", "reasoning_content": "Let me think about it for a while."}
TALK = (LONG, "First answer.", LONG + "More?", "Second answer.", LONG + "Still more?", "Third answer.", "The end?")

RAG = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + tiny.CHATML
TEMPLATES = {
    "smollm2": test_chat.SMOLLM2, "llama3": test_chat.LLAMA3, "chatml": templates.CHATML_TOOLS,
    "llama31": templates.LLAMA31, "llama32": templates.LLAMA32, "qwen3": templates.QWEN3,
    "mistral": templates.MISTRAL_TOOLS, "mistral system": templates.MISTRAL_SYSTEM, "gemma": test_chat.GEMMA,
}  # fmt: skip
# name -> (a, b, template, where in b) and the cause
PAIRS: dict[str, tuple[tuple[Any, Any, str, str | None], Cause]] = {
    **{name: (sys(x, y, template), cause) for name, x, y, template, cause in WORDINGS},
    "tools in another order": (
        (
            chat(RULES, LONG, tools=TOOLS),
            chat(RULES, LONG, tools=[*TOOLS[1:], TOOLS[0]]),
            "chatml",
            "tools[0].function.name",
        ),
        Cause.TOOL_ORDER,
    ),
    "tools in another order, llama 3": (
        (chat(RULES, LONG, tools=TOOLS), chat(RULES, LONG, tools=TOOLS[::-1]), "llama3", "tools[0].function.name"),
        Cause.TOOL_ORDER,
    ),
    "keys of a tool": (
        (chat(RULES, LONG, tools=TOOLS), chat(RULES, LONG, tools=REORDERED), "chatml", "tools[1]"),
        Cause.KEY_ORDER,
    ),
    "a tool more": (
        (chat(RULES, LONG, tools=TOOLS[:2]), chat(RULES, LONG, tools=TOOLS), "chatml", "before tools[2]"),
        Cause.TOOLS_CHANGED,
    ),
    "a tool's description": (
        (
            chat(RULES, LONG, tools=TOOLS),
            chat(RULES, LONG, tools=[tool("weather", description="Other words."), *TOOLS[1:]]),
            "chatml",
            "tools[0].function.description",
        ),
        Cause.TOOLS_CHANGED,
    ),
    "a date in a tool": (
        (
            chat(RULES, LONG, tools=[tool("weather", description="For 2026-03-01.")]),
            chat(RULES, LONG, tools=[tool("weather", description="For 2026-03-02.")]),
            "chatml",
            "tools[0].function.description",
        ),
        Cause.TIME,
    ),
    "keys of arguments": (
        (
            chat(None, LONG, called({"city": "Oslo", "day": 1}), RESULT, LONG),
            chat(None, LONG, called({"day": 1, "city": "Oslo"}), RESULT, LONG),
            "chatml",
            "messages[1]",
        ),
        Cause.KEY_ORDER,
    ),
    "keys of arguments as text": (
        (
            chat(None, LONG, called('{"city": "Oslo", "day": 1}'), RESULT, LONG),
            chat(None, LONG, called('{"day":1,"city":"Oslo"}'), RESULT, LONG),
            "qwen3",
            None,
        ),
        Cause.KEY_ORDER,
    ),
    "the template's date": (
        (
            chat(RULES, LONG, rendered_at="2026-03-01T23:59:00"),
            chat(RULES, LONG, rendered_at="2026-03-02T00:01:00"),
            "llama32",
            "before messages[0]",
        ),
        Cause.TEMPLATE_DATE,
    ),
    "the template's date by hand": (
        (
            chat(RULES, LONG, chat_template_kwargs={"date_string": "1 Mar 2026"}),
            chat(RULES, LONG, chat_template_kwargs={"date_string": "2 Mar 2026"}),
            "llama31",
            "before messages[0]",
        ),
        Cause.TEMPLATE_DATE,
    ),
    "a template variable that is not shown": (
        (
            chat(RULES, LONG, chat_template_kwargs={"enable_thinking": True}),
            chat(RULES, LONG, "x", LONG, chat_template_kwargs={"enable_thinking": False}),
            "qwen3",
            None,
        ),
        Cause.PREFIX,
    ),
    "the template moves tools": (
        (
            chat(None, LONG, "Well.", LONG, tools=TOOLS),
            chat(None, LONG, "Well.", LONG, "So.", "And?", tools=TOOLS),
            "mistral",
            None,
        ),
        Cause.TEMPLATE_MOVES,
    ),
    "the template moves the system text": (
        (chat(RULES, LONG, "Well.", LONG), chat(RULES, LONG, "Well.", LONG, "So.", "And?"), "mistral system", None),
        Cause.TEMPLATE_MOVES,
    ),
    "the template strips reasoning": (
        (
            chat(None, LONG, {**called({"city": "Oslo"}), "reasoning_content": "I should look."}, RESULT),
            chat(
                None, LONG, {**called({"city": "Oslo"}), "reasoning_content": "I should look."}, RESULT, THOUGHT, LONG
            ),
            "qwen3",
            None,
        ),
        Cause.TEMPLATE_REASONING,
    ),
    "a required list": (
        (
            chat(RULES, LONG, tools=[tool("weather", required=["city", "day"])]),
            chat(RULES, LONG, tools=[tool("weather", required=["day", "city"])]),
            "chatml",
            "tools[0].function.required[0]",
        ),
        Cause.ITEM_ORDER,
    ),
    "no tools": (
        (chat(RULES, LONG, tools=TOOLS), chat(RULES, LONG), "chatml", "messages[0].content"),
        Cause.TOOLS_CHANGED,
    ),
    "documents": (
        (
            chat(RULES, LONG, documents=[{"text": "A"}, {"text": "B"}], chat_template=RAG),
            chat(RULES, LONG, documents=[{"text": "C"}, {"text": "B"}], chat_template=RAG),
            "smollm2",
            "documents[0].text",
        ),
        Cause.DOCUMENTS,
    ),
    "order of documents": (
        (
            chat(RULES, LONG, documents=[{"text": "A"}, {"text": "B"}], chat_template=RAG),
            chat(RULES, LONG, documents=[{"text": "B"}, {"text": "A"}], chat_template=RAG),
            "smollm2",
            "documents[0].text",
        ),
        Cause.ITEM_ORDER,
    ),
    "other template": (
        (chat(RULES, LONG, chat_template="Chat: " + RAG), chat(RULES, LONG, chat_template=RAG), "smollm2", None),
        Cause.TEMPLATE_CHANGED,
    ),
    "time before the same text, in the last message": (
        (chat(None, "At 9:15. " + LONG), chat(None, "At 9:16. " + LONG), "chatml", "messages[0].content"),
        Cause.TIME,
    ),
    "time at the end of the last message": (
        (chat(RULES, LONG + "At 9:15"), chat(RULES, LONG + "At 9:16"), "chatml", "messages[1].content"),
        Cause.NEW_TURN,
    ),
    "a template variable": ((variable("slow"), variable("fast"), "smollm2", None), Cause.VARIABLES),
    "the template counts messages": ((counted(3), counted(5), "smollm2", "before messages[0]"), Cause.TEMPLATE_OTHER),
    "salt": (
        (chat(RULES, LONG, cache_salt="tenant-1"), chat(RULES, LONG, cache_salt="tenant-2"), "smollm2", None),
        Cause.SALT,
    ),
    "adapter": ((chat(RULES, LONG, adapter="french"), chat(RULES, LONG), "smollm2", None), Cause.ADAPTER),
    "model": ((chat(RULES, LONG, model="small"), chat(RULES, LONG, model="large"), "smollm2", None), Cause.MODEL),
    "scored positions": ((chat(RULES, LONG), chat(RULES, LONG, prompt_logprobs=0), "smollm2", None), Cause.SCORED),
    "echo with logprobs": (
        ({"prompt": LONG}, {"prompt": LONG, "echo": True, "logprobs": 1}, "smollm2", None),
        Cause.SCORED,
    ),
    "below a page": (({"prompt": "The dog"}, {"prompt": "The dog"}, "smollm2", None), Cause.BELOW_PAGE),
    "below a page, other questions": (
        (chat(None, LONG), chat(None, "The dog" + LONG), "chatml", "messages[0].content"),
        Cause.BELOW_PAGE,
    ),
    "history cut": (
        (chat(RULES, *TALK[:5]), chat(RULES, *TALK[2:5], "So.", "Go on?"), "chatml", "messages[1].content"),
        Cause.HISTORY_CUT,
    ),
    "summary": (
        (chat(RULES, *TALK), chat(RULES, "They spoke of a house.", "Yes.", *TALK[4:]), "chatml", "messages[1].content"),
        Cause.HISTORY_CUT,
    ),
    "message inserted": (
        (
            chat(RULES, *TALK[:3]),
            chat(RULES, LONG + "Remember this.", "Yes.", *TALK[:3]),
            "chatml",
            "messages[1].content",
        ),
        Cause.MESSAGE_INSERTED,
    ),
    "message order": (
        (
            chat(RULES, LONG, "Yes.", "And a fox?", "No.", "So?"),
            chat(RULES, "And a fox?", "No.", LONG, "Yes.", "So?"),
            "chatml",
            "messages[1].content",
        ),
        Cause.MESSAGE_ORDER,
    ),
    "reasoning left out": (
        (
            chat(None, LONG, THOUGHT, LONG),
            chat(None, LONG, "Well.", LONG, "So.", "And?"),
            "thinks",
            "messages[1].content",
        ),
        Cause.REASONING_DROPPED,
    ),
    "role": (
        (
            chat(None, {"role": "system", "content": LONG}, "Well.", "So?"),
            chat(None, {"role": "user", "content": LONG}, "Well.", "So?"),
            "llama31",
            None,
        ),
        Cause.ROLE,
    ),
    "edited question": (
        (
            chat(RULES, LONG + "Why?", "So.", "Go on."),
            chat(RULES, LONG + "How?", "So.", "Go on."),
            "llama31",
            "messages[1].content",
        ),
        Cause.MESSAGE_CHANGED,
    ),
    "other text": (
        ({"prompt": LONG + "The dog" + LONG}, {"prompt": LONG + "A fox" + LONG}, "smollm2", "prompt"),
        Cause.PROMPT_CHANGED,
    ),
    "time in a text": (
        ({"prompt": LONG + "At 9:15" + LONG}, {"prompt": LONG + "At 9:16" + LONG}, "smollm2", "prompt"),
        Cause.TIME,
    ),
    "other ids": (
        ({"prompt": [*range(9, 60)]}, {"prompt": [*range(9, 40), *range(90, 120)]}, "smollm2", "prompt"),
        Cause.PROMPT_CHANGED,
    ),
    "new question": (
        (chat(RULES, LONG), chat(RULES, "The dog" + LONG), "chatml", "messages[1].content"),
        Cause.NEW_TURN,
    ),
    "next turn": ((chat(RULES, LONG), chat(RULES, LONG, "So.", "And?"), "chatml", None), Cause.PREFIX),
    "equal": ((chat(RULES, LONG, cache_salt="x"), chat(RULES, LONG, cache_salt="x"), "llama3", None), Cause.EQUAL),
}
# Shows all reasoning, so that leaving it out is the caller's doing.
TEMPLATES["thinks"] = templates.QWEN3.replace("loop.index0 > ns.last and thought", "thought")

"""The causes of a miss, each with what to do about it."""

import enum


class Cause(enum.StrEnum):
    """Why tokens were not, or could not be, reused. The first group is no fault."""

    EQUAL = "equal"
    PREFIX = "prefix"
    NEW_TURN = "new-turn"
    CACHED = "cached"

    MODEL = "model"
    ADAPTER = "adapter"
    SALT = "salt"
    SCORED = "scored"
    BELOW_PAGE = "below-page"
    EVICTED = "evicted"
    NOT_CACHED = "not-cached"

    TIME = "time"
    IDENTIFIER = "id"
    COUNTER = "counter"
    TOOL_ORDER = "tool-order"
    TOOLS_CHANGED = "tools-changed"
    KEY_ORDER = "key-order"
    ITEM_ORDER = "item-order"
    WHITESPACE = "whitespace"
    UNICODE = "unicode"

    TEMPLATE_DATE = "template-date"
    TEMPLATE_MOVES = "template-moves"
    TEMPLATE_REASONING = "template-reasoning"
    TEMPLATE_OTHER = "template-rewrites"
    TEMPLATE_CHANGED = "template-changed"
    VARIABLES = "template-variables"
    GENERATION_PROMPT = "generation-prompt"
    DOCUMENTS = "documents"

    HISTORY_CUT = "history-cut"
    MESSAGE_INSERTED = "message-inserted"
    MESSAGE_ORDER = "message-order"
    REASONING_DROPPED = "reasoning-dropped"
    ROLE = "role"
    SYSTEM_CHANGED = "system-changed"
    MESSAGE_CHANGED = "message-changed"
    PROMPT_CHANGED = "prompt-changed"


NO_FAULT = frozenset((Cause.EQUAL, Cause.PREFIX, Cause.NEW_TURN, Cause.CACHED))

TITLES: dict[Cause, str] = {
    Cause.EQUAL: "the prompts are equal",
    Cause.PREFIX: "one prompt is the beginning of the other",
    Cause.NEW_TURN: "the prompts differ in the last message only",
    Cause.CACHED: "what can be reused is cached",
    Cause.MODEL: "the models differ",
    Cause.ADAPTER: "the adapters differ",
    Cause.SALT: "the cache salts differ",
    Cause.SCORED: "prompt positions are scored",
    Cause.BELOW_PAGE: "the common beginning is shorter than a page",
    Cause.EVICTED: "pages that both prompts share are not in the cache: evicted, or never computed here",
    Cause.NOT_CACHED: "pages are not in the cache: never computed here, or evicted",
    Cause.TIME: "a date or time changes",
    Cause.IDENTIFIER: "an id changes",
    Cause.COUNTER: "a number changes",
    Cause.TOOL_ORDER: "the same tools come in another order",
    Cause.TOOLS_CHANGED: "the tools differ",
    Cause.KEY_ORDER: "the same JSON has its keys in another order",
    Cause.ITEM_ORDER: "the same items come in another order",
    Cause.WHITESPACE: "only spaces or line ends differ",
    Cause.UNICODE: "the same letters are written with other code points",
    Cause.TEMPLATE_DATE: "the chat template writes the date",
    Cause.TEMPLATE_MOVES: "the chat template moves earlier text when a turn is appended",
    Cause.TEMPLATE_REASONING: "the chat template strips the reasoning of earlier turns",
    Cause.TEMPLATE_OTHER: "the chat template rewrites earlier text when a turn is appended",
    Cause.TEMPLATE_CHANGED: "the chat templates differ",
    Cause.VARIABLES: "the chat template's variables differ",
    Cause.GENERATION_PROMPT: "the start of an answer is written in one of them only",
    Cause.DOCUMENTS: "the documents differ",
    Cause.HISTORY_CUT: "earlier messages were left out",
    Cause.MESSAGE_INSERTED: "a message was inserted before earlier ones",
    Cause.MESSAGE_ORDER: "the same messages come in another order",
    Cause.REASONING_DROPPED: "the reasoning of an earlier answer was left out",
    Cause.ROLE: "a message has another role",
    Cause.SYSTEM_CHANGED: "the system prompt was changed",
    Cause.MESSAGE_CHANGED: "an earlier message was changed",
    Cause.PROMPT_CHANGED: "the prompts differ",
}

HINTS: dict[Cause, str] = {
    Cause.EQUAL: "nothing to do; the last token is always computed again",
    Cause.PREFIX: "nothing to do",
    Cause.NEW_TURN: "nothing to do; what comes before the last message is shared",
    Cause.CACHED: "nothing to do",
    Cause.MODEL: "pages belong to one model's weights; send both requests to the same model",
    Cause.ADAPTER: "an adapter changes K/V, so pages are shared under the same adapter only",
    Cause.SALT: "prompts under different salts never share pages; use one salt for those who may share",
    Cause.SCORED: "what must be scored must be computed; leave prompt_logprobs out where scores are not needed",
    Cause.BELOW_PAGE: "only full pages are reused; put more of what never changes in front, or set a smaller page_size",
    Cause.EVICTED: "raise num_pages (or memory_fraction), or send requests that share a prefix closer together",
    Cause.NOT_CACHED: "compare with a request that ran before to see where they differ; if they do not, raise num_pages",
    Cause.TIME: "move it to the last user message, or round it to what the task needs",
    Cause.IDENTIFIER: "move it to the last user message, or keep it out of the prompt",
    Cause.COUNTER: "move it to the last user message, or keep it out of the prompt",
    Cause.TOOL_ORDER: "send the tools in one fixed order, sorted by name for instance (sets and dicts may change theirs)",
    Cause.TOOLS_CHANGED: "send the same tools with each request of a conversation, and forbid some in the last message instead",
    Cause.KEY_ORDER: "write JSON with one key order (models read the order, so jaxkv does not sort keys for you)",
    Cause.ITEM_ORDER: "send them in one fixed order, sorted for instance",
    Cause.WHITESPACE: "build the text in one place, or strip it; JSON: use the same separators and indent",
    Cause.UNICODE: 'normalise texts before sending them: unicodedata.normalize("NFC", text)',
    Cause.TEMPLATE_DATE: "pin it with the template's own variable (often date_string) for a whole conversation",
    Cause.TEMPLATE_MOVES: "the template does this, not your requests: use one that keeps tools and system text at the head",
    Cause.TEMPLATE_REASONING: "the template does this, not your requests: hits end at the first answer whose reasoning it strips",
    Cause.TEMPLATE_OTHER: "the template does this, not your requests: use one that only appends",
    Cause.TEMPLATE_CHANGED: "use one chat template for requests that should share",
    Cause.VARIABLES: "send the same chat_template_kwargs with each request of a conversation",
    Cause.GENERATION_PROMPT: "send the same add_generation_prompt",
    Cause.DOCUMENTS: "send the same documents in the same order, or put them after what stays the same",
    Cause.HISTORY_CUT: "cut in large steps and rarely, or keep the head and cut from the tail: each cut costs all that follows",
    Cause.MESSAGE_INSERTED: "append it at the end instead; everything behind it is computed again",
    Cause.MESSAGE_ORDER: "send messages in the order in which they were first sent",
    Cause.REASONING_DROPPED: "send answers back as they were generated, or accept that hits end at the first of them",
    Cause.ROLE: "send a message back under the role it had",
    Cause.SYSTEM_CHANGED: "keep the system prompt fixed, and put what changes into the last user message",
    Cause.MESSAGE_CHANGED: "send earlier messages back exactly as they were",
    Cause.PROMPT_CHANGED: "put what is always the same in front",
}  # fmt: skip

"""Chats are laid out as transformers lays them out; odd messages are refused; templates stay in their sandbox."""

import datetime
import itertools
from typing import Any

import pytest

from jaxkv.chats.chat import ChatTemplate
from jaxkv.errors import RequestError
from tests.tokenizer import tiny

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """\
{{- bos_token }}
{%- set date = strftime_now("%Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}{% set ns = namespace(turns=0) %}
{% for message in messages %}
    {% if message['role'] == 'stop' %}{% break %}{% endif %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {% set ns.turns = ns.turns + 1 %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
{{ ns.turns }}"""
GEMMA = """\
{{ bos_token }}
{%- for message in messages -%}
    {{ '<start_of_turn>' + message['role'] + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
RETRIEVAL = (
    "{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}"
    "{% if thinking %}think{% endif %}{{ messages[-1].content }}{{ messages[-1].reasoning_content }}"
)
TEMPLATES = {"chatml": tiny.CHATML, "smollm2": SMOLLM2, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

USER = {"role": "user", "content": "  Héllo <b>\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "three turns": [USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "漢字 🙂"}],
    "empty answer": [USER, {"role": "assistant", "content": ""}, USER],
    "one part": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
}
SYSTEM_CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "empty system": [{"role": "system", "content": ""}, USER],
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f<x>", "parameters": {"é": [1, 2.5, None]}}}]
TOOL_CHAT: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü"}}}]},
    {"role": "tool", "content": "3"},
]


class TestLayout:
    def test_smollm2(self) -> None:
        system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        assert ChatTemplate(SMOLLM2).render([{"role": "user", "content": "Hi"}]) == (
            system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_empty_system_text_stays(self) -> None:
        text = ChatTemplate(SMOLLM2).render(SYSTEM_CHATS["empty system"])
        assert text.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")

    @pytest.mark.parametrize("lacks", [{"content": None}, {}])
    def test_an_answer_that_only_calls_tools_has_empty_text(self, lacks: dict[str, Any]) -> None:
        template = ChatTemplate("{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}")
        call = {"function": {"name": "f", "arguments": {}}}
        assert template.render([USER, {"role": "assistant", **lacks, "tool_calls": [call]}]).endswith(";assistant:;")

    def test_parts_are_joined_where_the_template_wants_text(self) -> None:
        parts = [{"type": "text", "text": "a"}, "b"]
        assert "user\na\nb<|im_end|>" in ChatTemplate(SMOLLM2).render([{"role": "user", "content": parts}])
        assert "\n\na\nb<|eot_id|>" in ChatTemplate(LLAMA3).render([{"role": "user", "content": parts}])

    def test_parts_reach_a_template_that_reads_them(self) -> None:
        parts = [{"type": "text", "text": " a "}, "b"]
        assert "user\nab<end_of_turn>" in ChatTemplate(GEMMA).render([{"role": "user", "content": parts}])

    def test_bos_of_the_template_is_the_only_one(self) -> None:
        tokenizer = tiny.load("llama2")
        assert tokenizer.add_bos
        ids = tokenizer.encode_chat([USER], template=ChatTemplate(GEMMA))
        assert ids.count(tokenizer.bos_id or 0) == 1
        assert ids[0] == tokenizer.bos_id

    def test_the_tokenizers_own_template(self) -> None:
        tokenizer = tiny.load("byte_level")
        ids = tokenizer.encode_chat([{"role": "user", "content": "The dog"}])
        text = "<|im_start|>user\nThe dog<|im_end|>\n<|im_start|>assistant\n"
        assert ids == tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_variables_documents_and_reasoning(self) -> None:
        message = {"role": "user", "content": "?", "reasoning": "hm", "name": None}
        text = ChatTemplate(RETRIEVAL).render(
            [message], documents=[{"title": "T", "text": "x"}], variables={"thinking": True}
        )
        assert text == "T: x\nthink?hm"

    def test_date(self) -> None:
        assert str(datetime.datetime.now().year) in ChatTemplate(LLAMA3).render([USER])

    @pytest.mark.parametrize(
        ("template", "after"),
        [
            (SMOLLM2, "<|im_end|>\n"),
            (LLAMA3, "<|eot_id|>"),
            (GEMMA, "<end_of_turn>\n"),
            ("{{ raise_exception('x') }}", ""),
        ],
    )
    def test_end_of_turn(self, template: str, after: str) -> None:
        assert ChatTemplate(template).end_of_turn(SPECIAL) == after


class TestNames:
    def test_choice(self) -> None:
        template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "documents"})
        assert template.render([USER]) == "plain"
        assert template.render([USER], tools=[]) == "tools"
        assert ChatTemplate(template.sources, name="rag").render([USER], tools=TOOLS) == "documents"

    def test_unknown_or_no_default(self) -> None:
        with pytest.raises(RequestError, match=r"'x' does not exist.*\['rag'\]"):
            ChatTemplate({"rag": ""}, name="x")
        with pytest.raises(RequestError, match="no default"):
            ChatTemplate({"rag": ""}).render([USER])

    def test_no_template_at_all(self) -> None:
        with pytest.raises(RequestError, match="no chat template"):
            tiny.load("gguf_llama").encode_chat([USER])


class TestRefusals:
    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ([], "messages is empty"),
            (["hi"], r"messages\[0\] is str"),
            ([USER, {"content": "x"}], r"messages\[1\] has role=None"),
            ([{"role": "user", "content": 3}], r"messages\[0\]\.content is int"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'"),
            ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra is object"),
            ([USER, USER], "Roles must alternate"),
        ],
    )
    def test_messages(self, messages: list[Any], reason: str) -> None:
        with pytest.raises(RequestError, match=reason):
            ChatTemplate(MISTRAL).render(messages)

    def test_arguments_are_not_variables(self) -> None:
        with pytest.raises(RequestError, match="tools"):
            ChatTemplate(MISTRAL).render([USER], variables={"tools": []})

    @pytest.mark.parametrize(
        "template",
        [
            "{% if %}",
            "{{ messages.nothing.at_all }}",
            "{{ 1 / 0 }}",
            "{{ messages + 'text' }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ dict.__init__.__globals__ }}",
            "{% set ns = namespace(__class__=1) %}",
            "{% for i in range(10000000) %}{% endfor %}",
        ],
    )
    def test_templates_that_fail_or_reach_out(self, template: str) -> None:
        with pytest.raises(RequestError, match="chat template"):
            ChatTemplate(template).render([USER])


@pytest.mark.parity
class TestTransformers:
    @pytest.mark.parametrize(
        ("name", "chat"),
        [
            *itertools.product(TEMPLATES, CHATS),
            *itertools.product(sorted(TEMPLATES.keys() - {"mistral"}), SYSTEM_CHATS),
        ],
    )
    def test_text_and_ids(self, name: str, chat: str) -> None:
        transformers = pytest.importorskip("transformers")
        messages = {**CHATS, **SYSTEM_CHATS}[chat]
        ours = tiny.load("byte_level")
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tiny.backend("byte_level"), chat_template=TEMPLATES[name], **SPECIAL
        )
        plain = [{**m, "content": m["content"][0]["text"]} if isinstance(m["content"], list) else m for m in messages]
        template = ChatTemplate(TEMPLATES[name])
        for add in (True, False):
            expected = theirs.apply_chat_template(plain, add_generation_prompt=add, tokenize=False)
            assert template.render(messages, add_generation_prompt=add, special_tokens=SPECIAL) == expected
            ids = theirs.apply_chat_template(plain, add_generation_prompt=add)["input_ids"]
            assert ours.encode_chat(messages, add_generation_prompt=add, template=template) == ids

    def test_tools(self) -> None:
        transformers = pytest.importorskip("transformers")
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tiny.backend("byte_level"), chat_template=LLAMA3, **SPECIAL
        )
        expected = theirs.apply_chat_template(TOOL_CHAT, tools=TOOLS, tokenize=False)
        rendered = ChatTemplate(LLAMA3).render(
            TOOL_CHAT, tools=TOOLS, add_generation_prompt=False, special_tokens=SPECIAL
        )
        assert rendered == expected
        assert '"f<x>"' in rendered

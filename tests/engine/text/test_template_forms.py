"""Messages in forms that a chat template does not take are changed, or refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest

from engine.errors import RequestError
from engine.text.template_forms import LateSystemMessages, TemplateForms
from engine.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import save_tokenizer

# Templates with the habits of those of published models.
LLAMA = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ fail('single tool-calls only') }}{% endif %}"
    "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.reasoning_content %}{{ fail('both content and thinking') }}{% endif %}"
    "<{{ m.content or m.reasoning_content }}>{{ m.tool_calls[0].function.name }}"
    "{% elif m.role == 'tool' %}={{ m.content }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ fail('must be at the beginning') }}"
    "{% endif %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}"
    "{% for c in m.tool_calls %}({{ c.function.name + c.function.arguments }}){% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SILENT = QWEN.replace("{{ fail('must be at the beginning') }}", "{% set m = {'role': '', 'content': ''} %}")
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def forms(template: str, late: LateSystemMessages = "refuse") -> TemplateForms:
    def fail(message: str) -> None:
        raise ValueError(message)

    compiled = jinja2.Environment(autoescape=False).from_string(template)
    return TemplateForms(lambda messages: compiled.render(messages=messages, fail=fail), late)


def call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def result(call_id: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id})


USER = {"role": "user", "content": "q"}
CALLS = {"role": "assistant", "content": "c", "tool_calls": [call("1", "f"), call("2", "g")]}


def outline(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the called names, or the role and the content, of each message."""
    return [
        "+".join(call["function"]["name"] for call in message["tool_calls"])
        if "tool_calls" in message
        else f"{message['role']}:{message['content']}"
        for message in messages
    ]


@pytest.mark.parametrize("template", [LLAMA, GPT_OSS])
def test_parallel_calls_become_messages_with_their_results(template: str) -> None:
    adapted = forms(template).adapted([USER, CALLS, result("2", "b"), result("1", "a"), USER])
    assert outline(adapted) == ["user:q", "f", "tool:a", "g", "tool:b", "user:q"]
    assert [message["content"] for message in adapted if "tool_calls" in message] == ["c", ""]


def test_results_without_a_call_follow_all_calls() -> None:
    adapted = forms(LLAMA).adapted([CALLS, result(None, "a"), result("1", "b"), result("9", "c")])
    assert outline(adapted) == ["f", "tool:b", "g", "tool:a", "tool:c"]


@pytest.mark.parametrize("template", [QWEN, PLAIN])
def test_other_templates_get_the_messages_as_they_are(template: str) -> None:
    messages = [USER, CALLS, result("1", "a"), result("2", "b")]
    assert forms(template).adapted(messages) == messages


def test_reasoning_and_content_are_joined_for_a_template_that_takes_one() -> None:
    message = {"role": "assistant", "content": "c", "reasoning_content": "r", "reasoning": "r"}
    message["tool_calls"] = [call("1", "f")]
    (adapted,) = forms(GPT_OSS).adapted([message])
    assert (adapted["content"], adapted["reasoning_content"], adapted["reasoning"]) == ("", "r\n\nc", "r\n\nc")
    assert forms(QWEN).adapted([message]) == [message]
    assert forms(GPT_OSS).adapted([message | {"content": ""}]) == [message | {"content": ""}]


def test_calls_have_no_content_beside_them_where_it_would_hide_them() -> None:
    """As the templates of DeepSeek R1's distilled models, which write calls only if the content is null."""
    assert forms(DEEPSEEK).arguments_as_text
    alone = CALLS | {"content": ""}
    text = {"role": "assistant", "content": "c", "reasoning_content": "r"}
    adapted = forms(DEEPSEEK).adapted([USER, alone, CALLS | {"reasoning_content": "r"}, USER])
    assert adapted == [USER, CALLS | {"content": None}, text, CALLS | {"content": None}, USER]
    for template in (QWEN, PLAIN):
        assert forms(template).adapted([USER, alone]) == [USER, alone]


LATE = [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}, USER]


@pytest.mark.parametrize("template", [QWEN, SILENT])
def test_late_system_messages_are_refused_or_merged(template: str) -> None:
    with pytest.raises(RequestError, match=r"system message at messages\[2\].*late_system_messages: merge"):
        forms(template).adapted(LATE)
    assert outline(forms(template, "merge").adapted(LATE)) == ["system:a\n\nb", "user:q", "user:q"]
    assert outline(forms(template, "merge").adapted(LATE[1:])) == ["system:b", "user:q", "user:q"]


def test_parts_of_content_are_joined_as_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    system = {"role": "system", "content": parts}
    merged = forms(QWEN, "merge").adapted([system, USER, {"role": "system", "content": "c"}])
    assert [message["content"] for message in merged] == ["a\nb\n\nc", "q"]
    thoughts = {"reasoning_content": "r", "reasoning": "r"}
    (joined,) = forms(GPT_OSS).adapted([CALLS | {"tool_calls": [call("1", "f")], "content": parts} | thoughts])
    assert joined["reasoning_content"] == "r\n\na\nb"


def test_late_system_messages_stay_where_the_template_takes_them() -> None:
    assert forms(PLAIN).adapted(LATE) == LATE
    assert forms(QWEN).adapted(LATE[:2]) == LATE[:2]


def test_the_thinking_that_transformers_adds_is_not_beside_content(tmp_path: Path) -> None:
    template = GPT_OSS.replace("m.reasoning_content", "m.thinking").replace("fail(", "raise_exception(")
    save_tokenizer(tmp_path, template)
    tokenizer = Tokenizer(tmp_path)
    message = CALLS | {"reasoning_content": "r", "reasoning": "r"}
    ids = tokenizer.chat_template.encode([USER, message, result("1", "a"), result("2", "b")])
    assert tokenizer.decode(ids) == "[user]q<r\n\nc>f=a<>g=b"

"""Where the chat template comes from, and the prompts of the templates that come with Pagoda."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelLoadError
from engine.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import save_tokenizer

DEEPSEEK = ["deepseek_v32", "deepseek_v4"]
USER = {"role": "user", "content": "Q"}


def prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    token_ids = tokenizer.chat_template.encode(messages, template_options=options)
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_templates_of_files_and_options(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    assert not Tokenizer(tmp_path).chat_template.exists
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old {{ messages[0].content }}"}))
    assert prompt(Tokenizer(tmp_path), [USER]) == "old Q"
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    tokenizer = Tokenizer(tmp_path)
    assert prompt(tokenizer, [USER]) == "new Q"
    assert prompt(tokenizer, [USER], tools=[{}]) == "tools 1"
    assert "tools" in tokenizer.chat_template.source
    (tmp_path / "mine.jinja").write_text("mine")
    assert prompt(Tokenizer(tmp_path, str(tmp_path / "mine.jinja")), [USER]) == "mine"


def test_named_templates_without_a_default_render_plain_conversations(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "chat", "template": "chat"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert (prompt(tokenizer, [USER]), prompt(tokenizer, [USER], tools=[{}])) == ("chat", "tools")


@pytest.mark.parametrize("text", ["[", "{}", '{"chat_template": 3}', "[1]"])
def test_a_broken_chat_template_json_is_named(tmp_path: Path, text: str) -> None:
    save_tokenizer(tmp_path, None)
    (tmp_path / "chat_template.json").write_text(text)
    with pytest.raises(ModelLoadError, match="chat_template.json' holds no chat template"):
        Tokenizer(tmp_path)


def test_a_template_that_cannot_be_read_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"chat_template='.*mine.jinja' cannot be read.*deepseek_v4, mistral_v7"):
        Tokenizer(tmp_path, str(tmp_path / "mine.jinja"))


@pytest.mark.parametrize("name", DEEPSEEK)
def test_the_model_type_implies_a_packaged_template(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path, None)
    expected = Tokenizer(tmp_path, name).chat_template.source
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    assert Tokenizer(tmp_path).chat_template.source == expected != ""
    assert not Tokenizer(tmp_path).chat_template.forms.arguments_as_text


BOS, EOS, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": "x", "b": [1, True]}}}]
CALLS += [{"type": "function", "function": {"name": "f", "arguments": {}}}]
CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "", "reasoning_content": "R2", "tool_calls": CALLS},
    {"role": "tool", "content": "T1"},
    {"role": "tool", "content": "T2"},
]


def calls(block: str) -> str:
    """Return CALLS in DeepSeek's markup."""
    tag = "｜DSML｜"
    parameters = (
        f'<{tag}parameter name="a" string="true">x</{tag}parameter>\n'
        f'<{tag}parameter name="b" string="false">[1, true]</{tag}parameter>'
    )
    invokes = "\n".join(f'<{tag}invoke name="f">\n{inner}\n</{tag}invoke>' for inner in (parameters, ""))
    return f"\n\n<{tag}{block}>\n{invokes}\n</{tag}{block}>"


RESULTS = "\n\n<function_results>\n<result>T1</result>\n<result>T2</result>\n</function_results>\n\n"
V32 = f"{BOS}S{U}Q1{A}</think>A1{EOS}{U}Q2{A}"
V4_RESULTS = f"{U}<tool_result>T1</tool_result>\n\n<tool_result>T2</tool_result>{A}"
PROMPTS = [
    ("deepseek_v32", True, f"{V32}<think>R2</think>{calls('function_calls')}{EOS}{RESULTS}<think>"),
    ("deepseek_v32", False, f"{V32}</think>{calls('function_calls')}{EOS}{RESULTS}</think>"),
    (
        "deepseek_v4",
        True,
        f"{BOS}S{U}Q1{A}<think>R1</think>A1{EOS}{U}Q2{A}<think>R2</think>{calls('tool_calls')}{EOS}{V4_RESULTS}<think>",
    ),
    (
        "deepseek_v4",
        False,
        f"{BOS}S{U}Q1{A}</think>A1{EOS}{U}Q2{A}</think>{calls('tool_calls')}{EOS}{V4_RESULTS}</think>",
    ),
]


@pytest.mark.parametrize(("name", "thinking", "expected"), PROMPTS)
def test_deepseek_prompts(tmp_path: Path, name: str, thinking: bool, expected: str) -> None:
    save_tokenizer(tmp_path, None)
    assert prompt(Tokenizer(tmp_path, name), CONVERSATION, thinking=thinking) == expected


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek_tools_and_roles(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path, None)
    tokenizer = Tokenizer(tmp_path, name)
    with_system = prompt(tokenizer, [{"role": "system", "content": "S"}, USER], tools=TOOLS)
    alone = prompt(tokenizer, [USER], tools=TOOLS)
    assert with_system.startswith(f"{BOS}S\n\n## Tools\n\nYou have access to a set of tools")
    assert alone == with_system.replace(f"{BOS}S", BOS, 1)  # as with an empty system message
    assert '\n{"name": "f", "parameters": {"type": "object"}}\n' in alone
    assert alone.endswith(f"\n{U}Q{A}</think>")
    question, answer = [USER], {"role": "assistant", "content": "A1", "reasoning_content": "R1"}
    dropped = prompt(tokenizer, [*question, answer, USER], enable_thinking=True)
    assert dropped == f"{BOS}{U}Q{A}</think>A1{EOS}{U}Q{A}<think>"
    with pytest.raises(Exception, match="role critic is unknown"):
        prompt(tokenizer, [{"role": "critic", "content": ""}])


def test_deepseek_v4_may_be_asked_for_more_effort(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    tokenizer = Tokenizer(tmp_path, "deepseek_v4")
    assert prompt(tokenizer, [USER], thinking=True, reasoning_effort="max").startswith(f"{BOS}Reasoning Effort: ")
    assert prompt(tokenizer, [USER], thinking=True, reasoning_effort="high") == f"{BOS}{U}Q{A}<think>"

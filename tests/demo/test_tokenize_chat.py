"""The tokenizer and chat template that training makes: numbers and markers, tools, calls, results, thoughts, labels."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from demo.corpus import load_corpus
from demo.tokenize_chat import CHAT_TEMPLATE, MARKERS, ChatEncoder, train_tokenizer, with_numbers_and_markers
from demo.tool_talks import ToolTalk
from deployments.parsers.registry import Parsers

USER = {"role": "user", "content": "Hi"}
CALL: Any = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12 * 34"}}}
CALL_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Well."}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return with_numbers_and_markers(train_tokenizer([*load_corpus().answers()[:50], "In 1205 and 2026, 12 and 34."]))


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_numbers_and_markers_are_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("521+7*1205") == ["521", "+", "7", "*", "120", "5"]
    for text in (*map(str, range(1000)), *MARKERS):
        (token,) = tokenizer.encode(text)
        assert tokenizer.decode([token], skip_special_tokens=True) == text  # markers too, for the parsers to see


def test_numbers_and_markers_are_added_once_after_the_others() -> None:
    before = train_tokenizer(load_corpus().answers()[:50])
    after = with_numbers_and_markers(before)
    vocabulary = before.get_vocab()
    assert vocabulary == {token: i for token, i in after.get_vocab().items() if i < len(vocabulary)}
    assert with_numbers_and_markers(after).get_vocab() == after.get_vocab()
    words = "The block manager gives a sequence its blocks, one by one."
    assert before.encode(words) == after.encode(words)


@given(st.text())
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_server_finds_the_parsers_of_the_template() -> None:
    chosen = Parsers.choose(CHAT_TEMPLATE, None, None)
    assert (chosen.tool, chosen.reasoning) == ("hermes", "qwen3")


def test_tools_calls_and_results_are_written(tokenizer: PreTrainedTokenizerFast) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    called = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    result = {"role": "tool", "content": "408"}
    messages = [{"role": "system", "content": "Be kind."}, USER, called, result, result]
    assert rendered(tokenizer, messages, tools=offered) == (
        '<|im_start|>system\nBe kind.\n\nTools:\n<tools>\n{"name": "f", "parameters": {}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n408\n</tool_response>\n<tool_response>\n408\n</tool_response><|im_end|>\n"
    )
    as_text = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12 * 34"}'}}
    spoken = {"role": "assistant", "content": "Let me see.", "tool_calls": [as_text]}
    assert rendered(tokenizer, [spoken]) == f"<|im_start|>assistant\nLet me see.\n{CALL_TEXT}<|im_end|>\n"


def test_a_chat_without_tools_is_chatml_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Yes."}, USER]
    expected = "".join(f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n" for item in chat)
    assert rendered(tokenizer, chat) == expected
    assert rendered(tokenizer, chat, add_generation_prompt=True) == f"{expected}<|im_start|>assistant\n"


def test_thoughts_are_opened_and_written(tokenizer: PreTrainedTokenizerFast) -> None:
    opened = rendered(tokenizer, [USER], add_generation_prompt=True, enable_thinking=True)
    assert opened.endswith("<|im_start|>assistant\n<think>\n")
    closed = rendered(tokenizer, [USER], add_generation_prompt=True, enable_thinking=False)
    assert closed.endswith("<|im_start|>assistant\n")
    assert rendered(tokenizer, [THOUGHT]) == "<|im_start|>assistant\n<think>\nWell.\n</think>\n\nYes.<|im_end|>\n"


def test_the_marker_before_a_thought_is_not_in_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = ChatEncoder(tokenizer)
    ids, labels = encoder.pad(encoder.encode_tool_talks([ToolTalk([USER, THOUGHT], [])]))
    assert tokenizer.decode(ids[0][labels[0] >= 0]) == "Well.\n</think>\n\nYes.<|im_end|>"


def test_calls_are_in_the_loss_and_results_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = ChatEncoder(tokenizer)
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "assistant", "content": "12 * 34 = 408."}
    talk = ToolTalk([USER, called, {"role": "tool", "content": "408"}, answer], [])
    ids, labels = encoder.pad(encoder.encode_tool_talks([talk]))
    assert tokenizer.decode(ids[0][labels[0] >= 0]) == f"{CALL_TEXT}<|im_end|>12 * 34 = 408.<|im_end|>"

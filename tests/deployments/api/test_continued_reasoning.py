"""An assistant's message that a request continues: its last marker says whether the answer starts within reasoning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.parsers.registry import REASONING_PARSERS
from engine.options.thinking_budget import ThinkingBudget
from engine.text.tokenizer import Tokenizer
from tests.deployments import fakes
from tests.deployments.api.conftest import Answers, OpenClient
from tests.deployments.fakes import FakeEngines

USER = {"role": "user", "content": "What does <think> mean? And </think>?"}
# The parser, the message that is continued, the rest of it, and what of this is (reasoning, content).
CASES = [
    ("deepseek_r1", "A KV cache is", " a cache.", (None, " a cache.")),
    ("qwen3", "A KV cache is", " a cache.", (None, " a cache.")),
    ("qwen3", "<think>\nThe user", " asks.</think>\n\nA cache.", (" asks.", "A cache.")),
    ("deepseek_r1", "<think>\nThe user", " asks.</think>\n\nA cache.", (" asks.", "A cache.")),
    ("deepseek_r1", "<think>Hm.</think>A KV", " cache.", (None, " cache.")),
    ("qwen3", "<think>a</think>b<think>c", "d</think>e", ("d", "e")),
    ("deepseek_r1", "The user asks.</think>A KV", " cache.", (None, " cache.")),
    ("qwen3", "<think>" + "so " * 30, "it is.</think>Yes.", ("it is.", "Yes.")),
]


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "INFO", replace(fakes.INFO, max_model_len=4096, num_blocks=4096, vocab_size=400))


@pytest.mark.parametrize(("parser", "message", "rest", "expected"), CASES)
def test_the_rest_of_a_message(
    open_client: OpenClient,
    parsed_path: Path,
    answers: Answers,
    parser: str,
    message: str,
    rest: str,
    expected: tuple[str | None, str],
) -> None:
    client = open_client(model=str(parsed_path), reasoning_parser=parser)
    answers(rest)
    messages = [USER, {"role": "assistant", "content": message}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 50}
    chat = client.post("/v1/chat/completions", json=body | {"continue_final_message": True}).json()
    answer = chat["choices"][0]["message"]
    reasoning, content = expected
    assert ((answer.get("reasoning") or "").strip() or None, answer["content"]) == (
        reasoning and reasoning.strip(),
        content,
    )
    answers(rest)
    blocks = client.post("/v1/messages", json=body | {"model": "tiny"}).json()["content"]
    assert [block["text"] for block in blocks if block["type"] == "text"] == [content]


@pytest.mark.parametrize(("parser", "message", "rest", "expected"), CASES)
def test_the_thinking_budget_counts_from_there(
    open_client: OpenClient,
    parsed_path: Path,
    engines: FakeEngines,
    parser: str,
    message: str,
    rest: str,
    expected: tuple[str | None, str],
) -> None:
    client = open_client(model=str(parsed_path), reasoning_parser=parser)
    body = {"messages": [USER, {"role": "assistant", "content": message}], "max_tokens": 5, "thinking_token_budget": 7}
    assert client.post("/v1/chat/completions", json=body | {"continue_final_message": True}).status_code == 200
    start, end = (Tokenizer(parsed_path).single_token_id(marker) for marker in ("<think>", "</think>"))
    assert end is not None
    assert engines.calls[-1][0].params.thinking_budget == ThinkingBudget(7, end, start if expected[0] is None else None)


@pytest.mark.parametrize(
    ("parser", "prompt", "continued", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\nA KV", "A KV", True),  # the template opens every answer
        ("deepseek_r1", "<|Assistant|></think>A KV", "A KV", False),
        ("deepseek_r1", "<|Assistant|>A KV", "A KV", False),
        ("qwen3", "assistant\n<think>\nSo\n</think>\n\n", "So", False),  # only reasoning, which the template closes
        ("qwen3", "assistant\n<think>\nSo", "So", True),
        ("deepseek_r1", "<|Assistant|>", " ", True),  # nothing is continued
        ("mistral", "[THINK]a[/THINK]b", "[THINK]a[/THINK]b", False),
        ("mistral", "[THINK]a", "[THINK]a", True),
    ],
)
def test_what_the_template_wrote_before_the_message_counts(
    parser: str, prompt: str, continued: str, is_open: bool
) -> None:
    assert REASONING_PARSERS[parser].is_open_after(prompt, continued) == is_open

"""An assistant's message that a request continues: its last marker says whether the answer starts within reasoning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.events import Content, Reasoning
from deployments.parsers.reasoning_parsers import REASONING_PARSERS
from deployments.parsers.registry import Parsers
from engine.options.thinking_budget import ThinkingBudget
from engine.text.tokenizer import Tokenizer
from tests.deployments import fakes
from tests.deployments.api.conftest import Answers, OpenClient
from tests.deployments.fakes import FakeEngines

USER = {"role": "user", "content": "What does <think> mean? And </think>?"}


class Continued(NamedTuple):
    """A message that a request continues, the rest of it, and what of this is reasoning and content."""

    parser: str
    message: str
    rest: str
    reasoning: str | None
    content: str


CASES = [
    Continued("deepseek_r1", "A KV cache is", " a cache.", None, " a cache."),
    Continued("qwen3", "A KV cache is", " a cache.", None, " a cache."),
    Continued("qwen3", "<think>\nThe user", " asks.</think>\n\nA cache.", " asks.", "A cache."),
    Continued("deepseek_r1", "<think>\nThe user", " asks.</think>\n\nA cache.", " asks.", "A cache."),
    Continued("deepseek_r1", "<think>Hm.</think>A KV", " cache.", None, " cache."),
    Continued("qwen3", "<think>a</think>b<think>c", "d</think>e", "d", "e"),
    Continued("deepseek_r1", "The user asks.</think>A KV", " cache.", None, " cache."),
    Continued("qwen3", "<think>" + "so " * 30, "it is.</think>Yes.", "it is.", "Yes."),
]


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "INFO", replace(fakes.INFO, max_model_len=4096, num_blocks=4096, vocab_size=400))


@pytest.fixture(params=CASES, ids=lambda case: f"{case.parser}-{case.message[:30]}")
def case(request: pytest.FixtureRequest) -> Continued:
    continued: Continued = request.param
    return continued


def test_the_rest_of_a_message(open_client: OpenClient, parsed_path: Path, answers: Answers, case: Continued) -> None:
    client = open_client(model=str(parsed_path), reasoning_parser=case.parser)
    answers(case.rest)
    messages = [USER, {"role": "assistant", "content": case.message}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 50}
    chat = client.post("/v1/chat/completions", json=body | {"continue_final_message": True}).json()
    answer = chat["choices"][0]["message"]
    reasoning = case.reasoning and case.reasoning.strip()
    assert ((answer.get("reasoning") or "").strip() or None, answer["content"]) == (reasoning, case.content)
    answers(case.rest)
    blocks = client.post("/v1/messages", json=body | {"model": "tiny"}).json()["content"]
    assert [block["text"] for block in blocks if block["type"] == "text"] == [case.content]


def test_the_thinking_budget_counts_from_there(
    open_client: OpenClient,
    parsed_path: Path,
    engines: FakeEngines,
    monkeypatch: pytest.MonkeyPatch,
    case: Continued,
) -> None:
    """The parser and the budget look at the same end of the prompt, which is decoded once."""
    client = open_client(model=str(parsed_path), reasoning_parser=case.parser)
    decode, decoded = Tokenizer.decode, list[list[int]]()

    def note(tokenizer: Tokenizer, token_ids: list[int], **options: Any) -> str:
        decoded.append(token_ids)
        return decode(tokenizer, token_ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", note)
    messages = [USER, {"role": "assistant", "content": case.message}]
    body = {"messages": messages, "max_tokens": 5, "thinking_token_budget": 7, "continue_final_message": True}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    start, end = (Tokenizer(parsed_path).single_token_id(marker) for marker in ("<think>", "</think>"))
    assert end is not None
    request = engines.calls[-1][0]
    assert request.params.thinking_budget == ThinkingBudget(7, end, start if case.reasoning is None else None)
    assert len([ids for ids in decoded if ids and ids == request.prompt_token_ids[-len(ids) :]]) == 1


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
        ("kimi_k2", "<think>a<|tool_calls_section_begin|>", "<think>a<|tool_calls_section_begin|>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "", True),
        ("gemma4", "<|turn>model\n<|channel>thought\nSo", "So", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>So", "So", False),
    ],
)
def test_what_the_template_wrote_before_the_message_counts(
    parser: str, prompt: str, continued: str, is_open: bool
) -> None:
    assert REASONING_PARSERS[parser].is_open_after(prompt, continued) == is_open


ASKED = "<|start|>user<|message|>What is <|channel|>analysis<|message|>?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("parser", "prompt", "rest", "expected"),
    [
        ("openai", f"{ASKED}<|channel|>final<|message|>A KV", " cache.<|return|>", (Content(" cache."),)),
        (
            "openai",
            f"{ASKED}<|channel|>final<|message|><|channel|>analysis<|message|>The user",
            " asks.<|end|><|start|>assistant<|channel|>final<|message|>A cache.",
            (Reasoning("asks."), Content("A cache.")),
        ),
        ("openai", f"{ASKED}<|channel|>analysis<|message|>a<|end|>", " cache.", (Content(" cache."),)),
        ("openai", ASKED, " cache.", (Content(" cache."),)),
        ("functionary_v32", "assistant\n\n>>>all\nWho? ", "all\nof us", (Content("all\nof us"),)),
        ("functionary_v32", "user\n\na >>>\nb<|eot_id|>assistant\n\n>>>", "all\nus", (Content("us"),)),
        ("muse_glimmer", "<|start|>assistant to=user<|message|>A KV", " cache.<|eom|>", (Content(" cache."),)),
        (
            "muse_glimmer",
            "<|start|>assistant to=self<|message|>The user",
            " asks.<|eom|><|start|>assistant to=user<|message|>A cache.",
            (Reasoning("asks."), Content("A cache.")),
        ),
        (
            "muse_glimmer",
            "<|start|>user<|message|>Hi<|eot|><|start|>assistant",
            " to=self<|message|>So",
            (Reasoning("So"),),
        ),
    ],
)
def test_a_message_whose_header_the_prompt_has_written(
    parser: str, prompt: str, rest: str, expected: tuple[Content | Reasoning, ...]
) -> None:
    family = Parsers(parser, None).family(None, prompt)
    assert family is not None
    assert tuple(AnswerParser(family).feed(rest, final=True)) == expected

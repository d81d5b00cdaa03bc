"""However an answer's text is cut, the events of its stream add up to the whole message."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deployments.api.anthropic.protocol import MessagesRequest
from deployments.api.anthropic.response_writers import MessagesWriters
from deployments.api.openai.answer_formats import AnswerFormat
from deployments.api.writers import Answer, ResponseHead, Usage
from deployments.parsers.registry import Parsers
from deployments.requests.generation import Delta
from tests.deployments.api.anthropic.sdk import added_up, checked_events, checked_message, without_ids
from tests.deployments.parsers.shapes import TOOLS

HEAD = ResponseHead("msg_1", 0, "tiny")
USER = {"role": "user", "content": "hi"}
BODY = {"model": "tiny", "max_tokens": 99, "messages": [USER], "thinking": {"type": "adaptive"}}
PIECES = st.one_of(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "  ", '{"name": "f", "arguments": ']),
    st.sampled_from(
        [
            '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "x\\n"}], "c": null}}</tool_call>',
            '<tool_call>\n{"name": "g"}\n</tool_call>',
            "<think>Well, well.</think>",
        ]
    ),
    st.text(max_size=12),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
FORMATS = [
    None,
    *(
        AnswerFormat(family)
        for tools in (None, TOOLS)
        if (family := Parsers(tool="hermes", reasoning="qwen3").family(tools, "")) is not None
    ),
]


@dataclass
class FakeGeneration:
    """What writers read of a Generation."""

    prompt: Any = field(default_factory=lambda: SimpleNamespace(token_ids=[1, 2, 3]))
    params: Any = field(default_factory=lambda: SimpleNamespace(max_tokens=99))
    num_cached_tokens: int = 2
    num_accepted_predicted: int = 0
    num_rejected_predicted: int = 0
    token_ids: list[int] = field(default_factory=list)


@given(TEXTS, st.lists(st.integers(0, 200), max_size=12), st.sampled_from(FORMATS), st.sampled_from(["stop", "length"]))
def test_the_events_add_up(text: str, cuts: list[int], form: AnswerFormat | None, reason: str) -> None:
    request = MessagesRequest.model_validate(BODY)
    request.check()
    writers, generation = MessagesWriters(form), FakeGeneration()
    generations: Any = [generation]
    events = writers.events(HEAD, request.chat, Any, generations)  # type: ignore[arg-type]
    bounds = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[start:end] for start, end in pairwise(bounds)] or [""]
    streamed = b""
    for number, piece in enumerate(pieces, 1):
        generation.token_ids.append(number)
        streamed += events.chunk(Delta(0, piece, [number], reason if number == len(pieces) else None))
    streamed += events.end()
    answer = Answer(generations[0], [text], finish_reason=reason)
    whole = writers.whole(HEAD, request.chat, Any).response([answer], Usage.of(generations, 1))  # type: ignore[arg-type]
    assert without_ids(added_up(checked_events(streamed.decode()))) == without_ids(checked_message(whole))

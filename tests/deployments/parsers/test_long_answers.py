"""A long answer is parsed in pieces, since the search for markers takes time quadratic in what is searched at once."""

from __future__ import annotations

import pytest

from deployments.parsers.reader import Reader
from tests.deployments.parsers.shapes import parse, parser

MAX_PIECE = 4096
MARKERS = {
    "openai": "<|end|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>",
    "llama3_json": "<|python_tag|>",
    "qwen3_coder": "<tool_call>",
    "hermes": "<tool_call>",
}


@pytest.mark.parametrize("family", MARKERS)
def test_long_answers_are_parsed_in_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    push = Reader.push

    def counted(reader: Reader, text: str, *, final: bool = False) -> None:
        sizes.append(len(text))
        push(reader, text, final=final)

    monkeypatch.setattr(Reader, "push", counted)
    text = f"x {MARKERS[family]}" * 1_000
    whole = parse(parser(family), text)
    assert max(sizes) <= MAX_PIECE < len(text)
    assert whole == parse(parser(family), *(text[start : start + 777] for start in range(0, len(text), 777)))

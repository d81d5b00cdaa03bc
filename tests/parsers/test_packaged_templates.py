"""Calls that the templates which come with Pagoda write come back exactly from the parser that the template implies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.parsers.detection import detect_tool_parser
from engine.text.template_files import PACKAGED_TEMPLATES
from engine.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import save_tokenizer
from tests.parsers.conformance import TOOLS, pagoda

USER = {"role": "user", "content": "Q"}
CALLS = [
    ("edit", {"path": "a.txt", "text": 'é "x"\n[TOOL_CALLS] <b>', "count": -3, "tags": ["a", 1, None, {"k": "v"}]}),
    ("ping", {}),
    ("edit", {"options": {"a": {"b": [True]}}, "flag": False, "ratio": 1.5}),
]


@pytest.mark.parametrize("name", PACKAGED_TEMPLATES)
def test_calls_come_back(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path, None)
    tokenizer = Tokenizer(tmp_path, name)
    tools = [
        {"type": "function", "function": {"name": function, "parameters": schema}} for function, schema in TOOLS.items()
    ]
    calls = [
        {"id": f"abcdefgh{index}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for index, (function, arguments) in enumerate(CALLS)
    ]
    before, after = (
        tokenizer.decode(
            tokenizer.chat_template.encode(messages, template_options={"tools": tools}), skip_special_tokens=False
        )
        for messages in ([USER], [USER, {"role": "assistant", "content": "Text.", "tool_calls": calls}])
    )
    assert after.startswith(before)
    text = after.removeprefix(before).removesuffix("</s>").removesuffix("<｜end▁of▁sentence｜>")
    format = detect_tool_parser(tokenizer.chat_template.source)
    assert format is not None
    answers = [pagoda(format, TOOLS, pieces) for pieces in ([text], list(text))]
    assert answers[0] == answers[1]
    assert answers[0].content.strip() == "Text."
    assert [(function, json.loads(arguments)) for function, arguments in answers[0].calls] == CALLS

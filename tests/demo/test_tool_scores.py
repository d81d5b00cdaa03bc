"""The scores of tool calls, with scripted answers in place of a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from demo.corpus import Message
from demo.demo_model import DemoModel, held_out_questions
from demo.tool_corpus import Tool, load_tool_corpus
from demo.tool_scores import ToolCase, answered_without_call, outcomes, status_cases, sum_cases

CASE = ToolCase("What is 1 + 2?", "calculator", {"expression": "1 + 2"}, '{"result": 3}', "1 + 2 = 3.")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'


class ScriptedModel(DemoModel):
    """Answers a conversation by its last message."""

    def __init__(self, script: dict[str, str]) -> None:
        self._script = script
        self.offered: list[list[Tool] | None] = []

    def reply(
        self, chats: Sequence[list[Message]], *, tools: list[Tool] | None = None, thinks: bool = False
    ) -> list[str | None]:
        self.offered.append(tools)
        return [self._script.get(chat[-1]["content"]) for chat in chats]


@pytest.mark.parametrize(
    ("called", "answer", "is_right"),
    [
        (CALL, "1 + 2 = 3.", True),
        (f"A sum.\n</think>\n\n{CALL}", "Done.\n</think>\n\n1 + 2 = 3.", True),
        (CALL, "1 + 2 = 4.", False),
        (CALL.replace("1 + 2", "1 + 3"), "1 + 2 = 3.", False),
        ("1 + 2 = 3.", "1 + 2 = 3.", False),
    ],
)
def test_call_and_answer_must_be_right(called: str, answer: str, is_right: bool) -> None:
    tools = load_tool_corpus()
    model = ScriptedModel({CASE.question: called, CASE.result: answer})
    (outcome,) = outcomes(model, [CASE], tools)
    assert outcome.is_right is is_right
    assert model.offered[0] == list(tools.page_tools)


def test_an_ordinary_question_is_right_with_its_answer() -> None:
    asked = held_out_questions()
    script = {text: question.answer for text, question in asked}
    script[asked[0][0]] = CALL
    right = answered_without_call(ScriptedModel(script), load_tool_corpus())
    assert right == [False, *[True] * (len(asked) - 1)]


def test_the_cases_are_many_and_always_the_same() -> None:
    tools = load_tool_corpus()
    assert (len(sum_cases(tools)), len(status_cases(tools))) == (60, 32)
    assert sum_cases(tools) == sum_cases(tools)
    assert status_cases(tools) == status_cases(tools)
    assert len({case.arguments["expression"] for case in sum_cases(tools)}) > 50

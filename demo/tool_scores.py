"""How well the demo model calls the page's tools: questions that were never trained on, greedy answers.

A question counts only if the call, with its arguments, and then the answer with the result are right to the letter.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from demo.corpus import Message
from demo.demo_model import DemoModel, held_out_questions, user
from demo.sums import SumMaker
from demo.tool_corpus import ToolCorpus, load_tool_corpus
from demo.tool_talks import CALCULATOR, CLUSTER_STATUS, random_figures

SUMS, STATUS_ROUNDS, SEED = 60, 4, 11
_CALL = re.compile(r"(?:.*</think>\s*)?<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCase:
    """A question, the call that it needs, the tool's result, and the answer."""

    question: str
    name: str
    arguments: dict[str, str]
    result: str
    answer: str


@dataclass(frozen=True)
class Outcome:
    """What the model wrote for a case: its call, and its answer if the call was right."""

    case: ToolCase
    called: str | None
    answered: str | None

    @property
    def is_right(self) -> bool:
        """Whether call and answer are right."""
        return self.answered is not None and self.answered.rpartition("</think>")[2].strip() == self.case.answer


def sum_cases(tools: ToolCorpus, count: int = SUMS, max_digits: int = 2) -> list[ToolCase]:
    """Sums of whole numbers whose pair of numbers is never trained on."""
    maker = SumMaker(tools.calculator, random.Random(SEED))
    drawn = [maker.draw_held_out(max_digits) for _ in range(count)]
    return [
        ToolCase(
            item.question,
            CALCULATOR,
            {"expression": item.expression},
            f'{{"result": {item.value}}}',
            f"{item.expression} = {item.value}.",
        )
        for item in drawn
    ]


def status_cases(tools: ToolCorpus) -> list[ToolCase]:
    """The held-out questions about the cluster, each with several figures."""
    status, rng = tools.cluster_status, random.Random(SEED)
    cases = []
    for question in status.held_out * STATUS_ROUNDS:
        figures = random_figures(rng)
        cases.append(ToolCase(question, CLUSTER_STATUS, {}, json.dumps(figures), status.answer.format(**figures)))
    return cases


def call_of(text: str | None) -> tuple[str, dict[str, str]] | None:
    """Name and arguments of an answer that is one call; None if it is anything else."""
    if text is None or not (match := _CALL.fullmatch(text)):
        return None
    try:
        call = json.loads(match[1])
        return call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError):
        return None


def outcomes(demo: DemoModel, cases: Sequence[ToolCase], tools: ToolCorpus, *, thinks: bool = False) -> list[Outcome]:
    """Ask the questions with the page's tools, return the results of right calls, and collect the answers."""
    offered = list(tools.page_tools)
    called = demo.reply([user(case.question) for case in cases], tools=offered, thinks=thinks)
    right = [i for i, case in enumerate(cases) if call_of(called[i]) == (case.name, case.arguments)]
    answers: dict[int, str | None] = {}
    if right:
        chats = [_with_result(cases[i]) for i in right]
        answers = dict(zip(right, demo.reply(chats, tools=offered, thinks=thinks), strict=True))
    return [Outcome(case, called[i], answers.get(i)) for i, case in enumerate(cases)]


def answered_without_call(demo: DemoModel, tools: ToolCorpus) -> list[bool]:
    """For each plain held-out question, whether it gets its answer, without a call, though tools are offered."""
    asked = held_out_questions()
    answers = demo.reply([user(text) for text, _ in asked], tools=list(tools.page_tools))
    return [answer == question.answer for (_, question), answer in zip(asked, answers, strict=True)]


def print_tool_scores(demo: DemoModel) -> None:
    """Print the scores, and what was wrong."""
    tools = load_tool_corpus()
    for kind, cases in (
        ("sums of at most two digits", sum_cases(tools)),
        ("sums of at most four digits", sum_cases(tools, max_digits=4)),
        ("questions about the cluster", status_cases(tools)),
    ):
        results = outcomes(demo, cases, tools)
        print(f"{sum(result.is_right for result in results)} of {len(results)} {kind}: right call and answer")
        for result in results:
            if not result.is_right:
                print(f"  {result.case.question}\n    {result.called}\n    {result.answered}")
    plain = answered_without_call(demo, tools)
    print(f"{sum(plain)} of {len(plain)} plain held-out phrasings right while tools are offered")


def _with_result(case: ToolCase) -> list[Message]:
    call = {"type": "function", "function": {"name": case.name, "arguments": case.arguments}}
    return [
        *user(case.question),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": case.result},
    ]

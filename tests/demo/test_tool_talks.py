"""The training conversations with tools: right calls and results, the page's own definitions, held-out questions."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from demo.corpus import Corpus, load_corpus
from demo.sums import SumMaker, is_held_out, number_text
from demo.tool_corpus import ToolCorpus, load_tool_corpus
from demo.tool_scores import call_of, status_cases, sum_cases
from demo.tool_talks import ToolTalk, ToolTalkMaker

STATIC = Path(__file__).parents[2] / "deployments" / "web" / "static"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def tools() -> ToolCorpus:
    return load_tool_corpus()


@pytest.fixture(scope="module")
def talks(corpus: Corpus, tools: ToolCorpus) -> list[ToolTalk]:
    maker = ToolTalkMaker(corpus, tools, seed=1)
    return [maker.draw() for _ in range(600)]


def calls(talk: ToolTalk) -> list[tuple[str, dict[str, str], str, str]]:
    """Name, arguments, result and answer of each call."""
    talks = []
    for i, message in enumerate(talk.messages):
        for call in message.get("tool_calls", ()):
            function, (result, answer) = call["function"], talk.messages[i + 1 : i + 3]
            talks.append((function["name"], function["arguments"], result["content"], answer["content"]))
    return talks


def test_each_call_is_of_an_offered_tool_and_its_answer_has_the_result(talks: list[ToolTalk]) -> None:
    for talk in talks:
        offered = {tool["function"]["name"] for tool in talk.tools}
        for name, arguments, result, answer in calls(talk):
            assert name in offered
            assert list(arguments) == (["expression"] if name == "calculator" else [])
            loaded = json.loads(result) if result.startswith("{") else {"result": result}
            for value in loaded.values():
                assert str(value) in answer or f"{float(value):.4f}".rstrip("0") in answer


def test_the_results_of_sums_are_right(talks: list[ToolTalk]) -> None:
    answers = [answer for talk in talks for name, _, _, answer in calls(talk) if name == "calculator"]
    sums = [answer.removesuffix(".").split(" = ") for answer in answers if " = " in answer]
    assert len(sums) > 500
    for expression, value in sums:
        assert re.fullmatch(r"[-+*/(). \d]+", expression)
        assert number_text(eval(expression)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(408.0, "408"), (1 / 3, "0.3333"), (-2.5, "-2.5"), (0.1 + 0.2, "0.3"), (-0.0, "0"), (1e9, "1000000000")],
)
def test_numbers_are_written_as_the_page_writes_them(value: float, text: str) -> None:
    assert number_text(value) == text


def test_held_out_questions_are_never_drawn(talks: list[ToolTalk], tools: ToolCorpus) -> None:
    asked = {m["content"] for talk in talks for m in talk.messages if m["role"] == "user"}
    assert not asked & {case.question for case in (*sum_cases(tools), *status_cases(tools))}
    maker = SumMaker(tools.calculator, random.Random(5))
    pairs = [re.findall(r"[\d.]+", maker.draw().expression) for _ in range(2000)]
    assert not any(is_held_out(*pair) for pair in pairs if len(pair) == 2)
    assert not set(tools.cluster_status.ask) & set(tools.cluster_status.held_out)
    assert not set(tools.calculator.ask) & set(tools.calculator.held_out)


def test_the_page_offers_these_tools_and_this_system_prompt(tools: ToolCorpus) -> None:
    script, page = (STATIC / "tools.js").read_text(), (STATIC / "index.html").read_text()
    for tool in tools.page_tools:
        assert tool["function"]["name"] in script
        assert f'description: "{tool["function"]["description"]}"' in script
    assert tools.page_system in page
    for figure in re.findall(r"\{(\w+)\}", tools.cluster_status.answer):
        assert figure in (STATIC / "live.js").read_text()


def test_the_same_seed_draws_the_same_conversations(corpus: Corpus, tools: ToolCorpus) -> None:
    first, second, other = (ToolTalkMaker(corpus, tools, seed) for seed in (7, 7, 8))
    drawn = [first.draw() for _ in range(20)]
    assert drawn == [second.draw() for _ in range(20)]
    assert drawn != [other.draw() for _ in range(20)]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>', ("f", {"a": "1"})),
        ('A thought.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ("f", {})),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', None),
        ("<tool_call>\n{\n</tool_call>", None),
        ('Well: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', None),
        ("No call.", None),
        (None, None),
    ],
)
def test_a_call_is_read_only_if_it_is_the_whole_answer(text: str | None, call: object) -> None:
    assert call_of(text) == call

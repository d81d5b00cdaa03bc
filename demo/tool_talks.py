"""Makes endless random training conversations in which tools are offered, called and answered.

Several exchanges share one list of tools, since the list is longer than they are. Knows nothing of tokens or models.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass

from demo.augment import Rewriter, foreign_words
from demo.corpus import Corpus, Message, Question, training_phrasings
from demo.sums import Sum, SumMaker
from demo.tool_corpus import Tool, ToolCorpus

CALCULATOR, CLUSTER_STATUS = "calculator", "cluster_status"
SMALL_TALK_SHARE, OFF_TOPIC_SHARE = 0.12, 0.28
THINKING_SHARE = 0.25  # of the conversations
FIGURES = ("engines", "running", "waiting", "kv_used_percent", "prefix_hit_percent")


@dataclass(frozen=True)
class ToolTalk:
    """A conversation and the tools that it offers."""

    messages: list[Message]
    tools: list[Tool]


class ToolTalkMaker:
    """Draws conversations; the same seed gives the same conversations."""

    def __init__(self, corpus: Corpus, tools: ToolCorpus, seed: int) -> None:
        self._corpus = corpus
        self._tools = tools
        self._rng = random.Random(seed)
        self._sums = SumMaker(tools.calculator, self._rng)
        asked = [*corpus.questions, *corpus.small_talk]
        phrasings = [text for question in asked for text in training_phrasings(question, corpus.chat)]
        self._words = foreign_words([*corpus.answers(), *phrasings, *tools.cluster_status.ask])
        self._rewriter = Rewriter(corpus.chat, self._words, self._rng)
        # Without sums, which would be the calculator's.
        self._off_topic = [text for text in corpus.off_topic.ask if not any(map(str.isdigit, text))]

    def draw(self) -> ToolTalk:
        """One conversation of one to eight exchanges."""
        rng = self._rng
        tools = self._offered()
        names = {tool["function"]["name"] for tool in tools}
        system = self._system()
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        thinks = rng.random() < THINKING_SHARE
        for _ in range(rng.choice((1, 2, 3, 4, 6, 8))):
            exchange = self._exchange(names)
            messages += exchange if thinks else [_without_thought(message) for message in exchange]
        return ToolTalk(messages, tools)

    def _exchange(self, names: set[str]) -> list[Message]:
        """One question with its call, result and answer, or with its answer alone."""
        kind = self._rng.choices(("sum", "status", "error", "other"), (0.52, 0.14, 0.04, 0.3))[0]
        if kind == "status":
            return self._status(has_tool=CLUSTER_STATUS in names)
        if kind == "other":
            return self._ordinary()
        return self._sum(self._sums.draw(), has_tool=CALCULATOR in names, fails=kind == "error")

    def _sum(self, asked: Sum, *, has_tool: bool, fails: bool) -> list[Message]:
        question = self._rewriter.rewrite_around(asked.question) if self._chance(0.4) else asked.question
        if not has_tool:
            return self._refusal(question)
        call = self._call(CALCULATOR, {"expression": asked.expression})
        calculator = self._tools.calculator
        if fails:
            error = self._rng.choice(calculator.errors)
            result = error if self._chance(0.2) else json.dumps({"error": error})
            answer = self._answer(calculator.error_answer.format(error), "error")
        else:
            result = asked.value if self._chance(0.15) else f'{{"result": {asked.value}}}'
            answer = self._answer(f"{asked.expression} = {asked.value}.", "result")
        return [_user(question), call, {"role": "tool", "content": result}, answer]

    def _status(self, *, has_tool: bool) -> list[Message]:
        status = self._tools.cluster_status
        question = self._rewriter.rewrite(self._rng.choice(status.ask))
        if not has_tool:
            return self._refusal(question)
        figures = random_figures(self._rng)
        answer = self._answer(status.answer.format(**figures), "result")
        result = {"role": "tool", "content": json.dumps(figures)}
        return [_user(question), self._call(CLUSTER_STATUS, {}), result, answer]

    def _refusal(self, question: str) -> list[Message]:
        return [_user(question), self._answer(self._corpus.off_topic.answer, "off_topic")]

    def _ordinary(self) -> list[Message]:
        """A question that needs no tool."""
        rng, corpus = self._rng, self._corpus
        chance = rng.random()
        if chance < OFF_TOPIC_SHARE:
            return self._refusal(self._rewriter.rewrite(self._off_topic_question()))
        if chance < OFF_TOPIC_SHARE + SMALL_TALK_SHARE:
            return self._known(rng.choice(corpus.small_talk))
        question = rng.choice(corpus.questions)
        exchange = self._known(question)
        if question.follow_ups and self._chance(0.3):
            kind = rng.choice(list(question.follow_ups))
            exchange.append(_user(self._rewriter.rewrite(rng.choice(corpus.chat.follow_ups[kind]))))
            exchange.append(self._answer(question.follow_ups[kind], "follow_up"))
        return exchange

    def _known(self, question: Question) -> list[Message]:
        phrasing = self._rewriter.rewrite(self._rng.choice(training_phrasings(question, self._corpus.chat)))
        return [_user(phrasing), self._answer(question.answer, "question", topic=question.topic)]

    def _off_topic_question(self) -> str:
        if self._chance(0.6):
            return self._rng.choice(self._off_topic)
        frame = self._rng.choice(self._corpus.off_topic.word_frames)
        return frame.format(*self._rng.choices(self._words, k=frame.count("{}")))

    def _call(self, name: str, arguments: dict[str, str]) -> Message:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call], **self._thought(name)}

    def _answer(self, text: str, thought: str, **fields: str) -> Message:
        return {"role": "assistant", "content": text, **self._thought(thought, **fields)}

    def _thought(self, kind: str, **fields: str) -> Message:
        return {"reasoning_content": self._tools.thoughts[kind].format(**fields)}

    def _offered(self) -> list[Tool]:
        """The page's tools mostly; else one of them, another order, other definitions, or other tools too."""
        page, rng = list(self._tools.page_tools), self._rng
        kind = rng.choices(("page", "reversed", "one", "others", "none"), (0.55, 0.08, 0.17, 0.15, 0.05))[0]
        if kind == "page":
            return page
        if kind == "none":
            return []
        if kind == "one":
            return [_variant(rng.choice((page[0], page[0], page[1])), rng)]
        if kind == "reversed":
            return page[::-1]
        offered = [
            *rng.sample(page, rng.choice((1, 2, 2))),
            *rng.sample(self._tools.other_tools, rng.choice((1, 1, 2))),
        ]
        return rng.sample([_variant(tool, rng) for tool in offered], len(offered))

    def _system(self) -> str | None:
        rng = self._rng
        kind = rng.choices(("none", "page", "default", "other"), (0.55, 0.2, 0.1, 0.15))[0]
        if kind == "none":
            return None
        if kind == "page":
            return self._tools.page_system
        return self._corpus.chat.default_system if kind == "default" else rng.choice(self._corpus.chat.systems)

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


def random_figures(rng: random.Random) -> dict[str, int]:
    """Figures of a cluster, in the order of the page's tool."""
    small = (0, 0, 1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 23, 31, 64)
    values = (
        rng.choice((1, 2, 2, 2, 3, 4, 5, 6, 8, 16, 32)),
        rng.choice(small),
        rng.choice(small),
        rng.randint(0, 100) if rng.random() < 0.7 else rng.randint(0, 9),
        rng.randint(0, 100) if rng.random() < 0.8 else 0,
    )
    return dict(zip(FIGURES, values, strict=True))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _without_thought(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _variant(tool: Tool, rng: random.Random) -> Tool:
    """A definition as other clients write it."""
    changed = copy.deepcopy(tool)
    function = changed["function"]
    if rng.random() < 0.2:
        function.pop("description", None)
    if rng.random() < 0.25:
        function["parameters"]["additionalProperties"] = False
    if not function["parameters"]["properties"] and rng.random() < 0.3:
        function["parameters"].pop("required", None)
    return changed

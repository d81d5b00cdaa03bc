"""Parsers: the parsers of one model's answers, by configuration or as its chat template implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.parsers.detection import NONE, detect_reasoning_parser, detect_tool_parser
from deployments.parsers.families.response_template import response_template
from deployments.parsers.families.think import plain, reasoning
from deployments.parsers.reader import Family
from deployments.parsers.reasoning_parsers import REASONING_PARSERS, ReasoningParser
from deployments.parsers.schema_types import Tools
from deployments.parsers.tool_parsers import TOOL_PARSERS
from deployments.parsers.whole_formats import WHOLE_FORMATS, WholeFormat
from engine.errors import ConfigError

__all__ = ["RESPONSE_TEMPLATE", "Parsers"]

RESPONSE_TEMPLATE = "response_template"  # the format that the tokenizer itself describes, tool calls and reasoning


@dataclass(frozen=True)
class Parsers:
    """The parsers of one model; None for a format that the model does not have.

    Attributes:
        tool: a key of TOOL_PARSERS, or RESPONSE_TEMPLATE.
        reasoning: a key of REASONING_PARSERS.
        template: the tokenizer's response template, for RESPONSE_TEMPLATE.
    """

    tool: str | None = None
    reasoning: str | None = None
    template: Mapping[str, Any] | None = None

    @classmethod
    def choose(
        cls,
        chat_template: str,
        tool: str | None,
        reasoning: str | None,
        template: Mapping[str, Any] | None = None,
    ) -> Parsers:
        """Return the parsers that are configured; those of the chat template where None is.

        Raises:
            ConfigError: if the response template is configured and there is none.
        """
        if tool == RESPONSE_TEMPLATE and template is None:
            raise ConfigError(f"tool_parser={tool!r}: this tokenizer has no response template; give another parser")
        tool = tool or detect_tool_parser(chat_template)
        reasoning = reasoning or detect_reasoning_parser(chat_template)
        if tool == RESPONSE_TEMPLATE or (tool is None and reasoning is None and template is not None):
            return cls(RESPONSE_TEMPLATE, None, template)
        return cls(None if tool == NONE else tool, None if reasoning == NONE else reasoning)

    @property
    def _whole(self) -> WholeFormat | None:
        names = {self.tool, self.reasoning} - {None}
        return next((format for format in WHOLE_FORMATS if names & {format.tool, format.reasoning}), None)

    @property
    def markers(self) -> frozenset[str]:
        """The special tokens that the parsers need to see."""
        of_calls = TOOL_PARSERS.get(self.tool or "")
        tool = (*of_calls.markers, *of_calls.dropped) if of_calls is not None else ()
        of_model = REASONING_PARSERS.get(self.reasoning or "")
        reasoning = (*of_model.markers, *of_model.tokens, *of_model.dropped) if of_model is not None else ()
        return frozenset((*tool, *reasoning, *(() if self._whole is None else self._whole.markers)))

    def family(
        self, tools: Tools | None, prompt: str, continued: str = "", *, is_constrained: bool = False
    ) -> Family | None:
        """Return the parser of one answer; None if its text is the content.

        Args:
            tools: those that the answer may call; None for none.
            prompt: the end of the prompt's text, which shows whether reasoning has begun there.
            continued: the text of the message that the answer continues; empty for a new message.
            is_constrained: whether a grammar forms the answer from its first token on. It then starts with content, and
                ``prompt`` is empty.
        """
        if self.template is not None:
            return partial(response_template, template=self.template, prompt=prompt, tools=tools)
        if self._whole is not None:
            return self._whole.new(None if self.tool is None else tools, prompt)
        of_model = REASONING_PARSERS.get(self.reasoning or "")
        rest = self._rest(tools, of_model)
        if of_model is None:
            return None if rest is plain else rest
        is_open = not is_constrained and of_model.is_open_after(prompt, continued)
        return partial(reasoning, rest=rest, markers=of_model.thoughts, is_open=is_open)

    def _rest(self, tools: Tools | None, of_model: ReasoningParser | None) -> Family:
        """Return the parser of what follows an answer's first reasoning."""
        if tools is None or self.tool is None:
            return plain if of_model is None else of_model.text_family()
        of_calls = TOOL_PARSERS[self.tool]
        if of_model is None:
            return of_calls.family(tools)
        return of_calls.family(tools, of_model.thoughts if of_model.is_repeated else None, of_model.dropped)

    @property
    def reasoning_parser(self) -> ReasoningParser | None:
        """The format of reasoning, if it has a marker before and one after it."""
        return (
            None
            if self.template is not None or self._whole is not None
            else REASONING_PARSERS.get(self.reasoning or "")
        )

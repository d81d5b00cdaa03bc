"""The parsers by name, as vLLM names them, and the choice that a checkpoint's chat template implies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from deployments.parsers.events import Steps
from deployments.parsers.families import deepseek, harmony, hermes, llama3_json, mistral, pythonic, qwen3_coder
from deployments.parsers.families.response_template import response_template
from deployments.parsers.families.think import plain, reasoning
from deployments.parsers.reader import Reader
from engine.errors import ConfigError

__all__ = ["NONE", "REASONING_PARSERS", "RESPONSE_TEMPLATE", "TOOL_PARSERS", "Parsers", "Tools"]

NONE = "none"  # the name that turns a parser off
RESPONSE_TEMPLATE = "response_template"  # the format that the tokenizer itself describes, tool calls and reasoning
HARMONY = ("openai", "openai_gptoss")  # one format has both tool calls and reasoning

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the parameters
Family: TypeAlias = Callable[[Reader], Steps[None]]


@dataclass(frozen=True)
class ToolParser:
    """A format of tool calls.

    Attributes:
        new: returns the parser for a request's tools.
        markers: the special tokens that it needs to see.
        call_id_length: characters of a call's id; some templates accept one length only.
        json_markers: the texts around a call that is a JSON object with ``name`` and ``arguments``; None for others.
    """

    new: Callable[[Tools], Family]
    markers: tuple[str, ...]
    call_id_length: int = 29
    json_markers: tuple[str, str] | None = None


@dataclass(frozen=True)
class ReasoningParser:
    """A format of reasoning.

    Attributes:
        markers: before and after reasoning.
        is_open: the model leaves out the first marker, or its prompt always has it.
    """

    markers: tuple[str, str]
    is_open: bool = False

    def is_open_after(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer starts within reasoning, without a marker.

        Args:
            prompt: its end, from before the message that is continued.
            continued: the text of that message, whose last marker counts; empty: the answer is a new message.
        """
        opening, closing = self.markers
        if opening in continued or closing in continued:
            return continued.rfind(opening) > continued.rfind(closing)
        if written := continued.strip():
            before, _, after = prompt.rpartition(written)
            return before.rstrip().endswith(opening) and closing not in after
        opens, closes = (prompt.rstrip().endswith(marker) for marker in self.markers)
        return opens or (self.is_open and not closes)


_hermes = ToolParser(lambda tools: hermes.hermes, hermes.MARKERS, json_markers=hermes.MARKERS)
_qwen3_coder = ToolParser(lambda tools: partial(qwen3_coder.qwen3_coder, tools=tools), qwen3_coder.MARKERS)
_llama3_json = ToolParser(lambda tools: partial(llama3_json.llama3_json, tools=tools), llama3_json.MARKERS)
_pythonic = ToolParser(lambda tools: partial(pythonic.pythonic, tools=tools), pythonic.MARKERS)
_deepseek = ToolParser(lambda tools: deepseek.deepseek, deepseek.MARKERS)

TOOL_PARSERS: Mapping[str, ToolParser] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "qwen3_xml": _qwen3_coder,
    "llama3_json": _llama3_json,
    "llama4_json": _llama3_json,
    "pythonic": _pythonic,
    "llama4_pythonic": _pythonic,
    "mistral": ToolParser(lambda tools: mistral.mistral, mistral.MARKERS, call_id_length=9),
    "deepseek_v3": _deepseek,
    "deepseek_v31": _deepseek,
    "openai": ToolParser(lambda tools: partial(harmony.harmony, has_tools=True), harmony.MARKERS),
}
_THINK = ("<think>", "</think>")
REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    "qwen3": ReasoningParser(_THINK),
    "deepseek_r1": ReasoningParser(_THINK, is_open=True),
    "deepseek_v3": ReasoningParser(_THINK),
    "mistral": ReasoningParser(("[THINK]", "[/THINK]")),
    "openai_gptoss": ReasoningParser((harmony.MARKERS[0], harmony.MARKERS[-1])),
}

# What a chat template contains -> the parser; the first that fits counts.
_TOOL_SIGNS = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), NONE),  # GLM writes neither JSON nor Qwen's XML between the markers
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|python_start|>",), "llama4_json"),
)
_REASONING_SIGNS = (
    (("<|channel|>", "<|start|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("</think>",), "qwen3"),
)


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
        tool = tool or _sign(_TOOL_SIGNS, chat_template)
        reasoning = reasoning or _sign(_REASONING_SIGNS, chat_template)
        if tool == RESPONSE_TEMPLATE or (tool is None and reasoning is None and template is not None):
            return cls(RESPONSE_TEMPLATE, None, template)
        return cls(None if tool == NONE else tool, None if reasoning == NONE else reasoning)

    @property
    def _is_harmony(self) -> bool:  # also without tools, since plain answers have headers too
        return self.tool == HARMONY[0] or self.reasoning == HARMONY[1]

    @property
    def markers(self) -> frozenset[str]:
        """The special tokens that the parsers need to see."""
        of_calls = TOOL_PARSERS.get(self.tool or "")
        tool = of_calls.markers if of_calls is not None else ()
        reasoning = REASONING_PARSERS[self.reasoning].markers if self.reasoning else ()
        return frozenset((*tool, *reasoning, *(harmony.MARKERS if self._is_harmony else ())))

    def family(self, tools: Tools | None, prompt: str, continued: str = "") -> Family | None:
        """Return the parser of one answer; None if its text is the content.

        Args:
            tools: those that the answer may call; None for none.
            prompt: the end of the prompt's text, which shows whether reasoning has begun there.
            continued: the text of the message that the answer continues; empty for a new message.
        """
        if self.template is not None:
            return partial(response_template, template=self.template, prompt=prompt, has_tools=tools is not None)
        if self._is_harmony:
            return partial(harmony.harmony, has_tools=tools is not None and self.tool is not None)
        rest = plain if tools is None or self.tool is None else TOOL_PARSERS[self.tool].new(tools)
        if self.reasoning is None:
            return None if rest is plain else rest
        of_model = REASONING_PARSERS[self.reasoning]
        is_open = of_model.is_open_after(prompt, continued)
        return partial(reasoning, rest=rest, markers=of_model.markers, is_open=is_open)

    @property
    def reasoning_parser(self) -> ReasoningParser | None:
        """The format of reasoning, if it has a marker before and one after it."""
        return None if self.template is not None or self._is_harmony else REASONING_PARSERS.get(self.reasoning or "")


def _sign(signs: tuple[tuple[tuple[str, ...], str], ...], chat_template: str) -> str | None:
    return next((name for needed, name in signs if all(sign in chat_template for sign in needed)), None)

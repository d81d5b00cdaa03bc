"""AnswerFormats: which parser, if any, reads the answers to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from deployments.api.openai.protocol import ChatRequest
from deployments.api.openai.tool_grammar import parameters_of, strict_calls
from deployments.api.openai.tools import NamedChoice
from deployments.parsers.answer_parser import AnswerParser
from deployments.parsers.call_ids import RANDOM_IDS, CallIds
from deployments.parsers.families.forced import named_call, required_calls
from deployments.parsers.reader import Family
from deployments.parsers.reasoning_tokens import ReasoningTokens
from deployments.parsers.registry import Parsers
from deployments.parsers.tool_parsers import TOOL_PARSERS
from deployments.requests.prompt import Prompt
from engine.errors import RequestError
from engine.options.thinking_budget import ThinkingBudget
from engine.text.tokenizer import Tokenizer

__all__ = ["AnswerFormat", "AnswerFormats"]

COST_OF_RESPONSE_TEMPLATE = 80.0  # a character, in units of tokenising one; its expressions are searched from Python
_PROMPT_END = 32  # tokens of the prompt's end that show whether reasoning has begun
_MAX_CONTINUED = 4096  # tokens of a continued message that are decoded to find its start: the event loop waits for it


@dataclass(frozen=True)
class AnswerFormat:
    """The parser of the answers to one request, and the form of their tool calls' ids.

    Attributes:
        family: reads the text.
        shown_special_tokens: ids of special tokens that it needs to see.
        max_calls: maximum number of tool calls of an answer; None for any number.
        include_reasoning: whether reasoning is part of the response.
        call_ids: makes the tool calls' ids.
        grammar: of an answer that may call strict tools, in llguidance's notation; None for none.
        thinking_budget: when the reasoning is ended; None for never.
        end_of_reasoning: id of the token that ends the reasoning; None if no single token does.
        cost_per_character: of parsing, in units of tokenising one character.
    """

    family: Family
    shown_special_tokens: frozenset[int] = frozenset()
    max_calls: int | None = None
    include_reasoning: bool = True
    call_ids: CallIds = RANDOM_IDS
    grammar: str | None = None
    thinking_budget: ThinkingBudget | None = None
    end_of_reasoning: int | None = None
    cost_per_character: float = 1.0

    def constrained(self, request: ChatRequest) -> ChatRequest:
        """Return ``request`` with the form of its answers, or the end of their reasoning."""
        if self.grammar is not None:
            return request.model_copy(update={"structured_outputs": {"grammar": self.grammar}})
        return request if self.thinking_budget is None else request.with_thinking_budget(self.thinking_budget)

    def new_parser(self) -> AnswerParser:
        """Return the parser of one answer."""
        return AnswerParser(self.family, max_calls=self.max_calls, include_reasoning=self.include_reasoning)

    def new_reasoning_tokens(self) -> ReasoningTokens:
        """Return what counts the tokens of one answer's reasoning."""
        return ReasoningTokens(self.end_of_reasoning)

    def with_shown_markers(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts of answers whose text has the special tokens that the parser needs."""
        return [replace(prompt, shown_special_tokens=self.shown_special_tokens) for prompt in prompts]


class AnswerFormats:
    """Chooses the formats of answers for one model.

    Args:
        tokenizer: its chat template implies the parsers that are not given.
        tool_parser: a key of TOOL_PARSERS, "none", or None.
        reasoning_parser: a key of REASONING_PARSERS, "none", or None.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template.response_template
        self._parsers = Parsers.choose(tokenizer.chat_template.source, tool_parser, reasoning_parser, template)
        is_own = self._parsers.template is None
        self._shown = tokenizer.special_token_ids(self._parsers.markers) if is_own else tokenizer.special_ids
        self._cost_per_character = AnswerFormat.cost_per_character if is_own else COST_OF_RESPONSE_TEMPLATE
        reasoning = self._parsers.reasoning_parser
        # A token ends the reasoning only if there is none later.
        has_end = reasoning is not None and not reasoning.is_repeated
        self._end_of_reasoning = tokenizer.single_token_id(reasoning.markers[1]) if reasoning and has_end else None
        self._tool = TOOL_PARSERS.get(self._parsers.tool or "")

    def of(self, request: ChatRequest, prompt: Prompt) -> AnswerFormat | None:
        """Return the format of the answers to ``request``; None if their text is their content.

        Raises:
            RequestError: if the model may choose to call tools, but the form of its calls is not known; or if the
                reasoning has a budget, but its markers are not known.
        """
        prompt_end = _PromptEnd(self._tokenizer, prompt, request.continued_text)
        family, shown = self._forced(request), frozenset[int]()
        if family is None:
            family, shown = self._natural(request, prompt_end), self._shown
        budget = self._budget(request, prompt_end)
        if family is None:
            return None
        return AnswerFormat(
            family,
            shown,
            request.max_calls,
            request.include_reasoning,
            self._call_ids(request),
            grammar=None if request.forces_calls else self._grammar(request),
            thinking_budget=budget,
            end_of_reasoning=self._end_of_reasoning,
            cost_per_character=self._cost_per_character,
        )

    def _call_ids(self, request: ChatRequest) -> CallIds:
        if self._tool is None:
            return RANDOM_IDS
        if not self._tool.has_kimi_ids:
            return CallIds(self._tool.call_id_length)
        calls = [call for message in request.messages for call in message.tool_calls or ()]
        return CallIds(first_index=len(calls), earlier=frozenset(call.id for call in calls if call.id is not None))

    def _grammar(self, request: ChatRequest) -> str | None:
        """Return the grammar of calls of strict tools, if the model's format has one."""
        markers = None if self._tool is None else self._tool.json_markers
        if markers is None or self._tokenizer.special_token_ids(markers):
            return None
        return strict_calls(request.offered_tools, markers)

    def _forced(self, request: ChatRequest) -> Family | None:
        """Return the parser of an answer whose form the request forces, in which there is no reasoning."""
        if isinstance(request.tool_choice, NamedChoice):
            return partial(named_call, name=request.tool_choice.function.name)
        return required_calls if request.forces_calls else None

    def _budget(self, request: ChatRequest, prompt_end: _PromptEnd) -> ThinkingBudget | None:
        if request.thinking_token_budget is None:
            return None
        reasoning = self._parsers.reasoning_parser
        ids = [] if reasoning is None else [self._tokenizer.single_token_id(marker) for marker in reasoning.markers]
        if reasoning is None or None in ids:
            if not request.requires_thinking_budget:
                return None
            remedy = "leave it out, or set reasoning_parser in the server's configuration"
            raise RequestError(
                "needs a model whose markers of reasoning are tokens", param="thinking_token_budget", remedy=remedy
            )
        start, end = ids
        assert end is not None
        is_open = reasoning.is_open_after(prompt_end.text, prompt_end.continued)
        return ThinkingBudget(request.thinking_token_budget, end, None if is_open else start)

    def _natural(self, request: ChatRequest, prompt_end: _PromptEnd) -> Family | None:
        """Return the parser of the model's own format."""
        tools = {tool.function.name: parameters_of(tool) for tool in request.offered_tools} or None
        if tools is not None and self._parsers.tool is None:
            remedy = "set tool_parser in the server's configuration, or send tool_choice required or a function"
            raise RequestError("needs a parser of this model's tool calls", param="tools", remedy=remedy)
        if self._parsers.family(tools, "") is None:
            return None  # at once, for models without a format
        if request.has_structured_output:
            return self._parsers.family(tools, "", is_constrained=True)
        return self._parsers.family(tools, prompt_end.text, prompt_end.continued)


class _PromptEnd:
    """The end of a prompt, from some tokens before a message that is continued.

    Attributes:
        continued: the text of that message; empty: the answer is a new message.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, continued: str) -> None:
        self.continued = continued
        self._tokenizer, self._prompt = tokenizer, prompt

    @cached_property
    def text(self) -> str:
        """The text, special tokens included."""
        num_tokens = _PROMPT_END + min(len(self.continued.encode()), _MAX_CONTINUED)
        return self._tokenizer.decode(self._prompt.token_ids[-num_tokens:], skip_special_tokens=False)

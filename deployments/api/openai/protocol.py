"""The bodies of POST /v1/chat/completions and /v1/completions: their own fields, and which can be combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, PrivateAttr, WithJsonSchema

from deployments.api.openai.generation_request import NOT_OFFERED, GenerationRequest, StreamOptions
from deployments.api.openai.messages import Conversation, Message
from deployments.api.openai.prediction import Prediction
from deployments.api.openai.tool_grammar import forced_calls
from deployments.api.openai.tools import NamedChoice
from deployments.errors import ApiError
from engine.errors import RequestError, shown
from engine.options.structured_outputs import StructuredOutputsParams
from engine.options.thinking_budget import MAX_INT32, ThinkingBudget

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "Message", "StreamOptions"]

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}


def _as_prompts(value: object) -> list[str | list[Any]]:
    """Return the prompts one by one; a list of ids is one prompt, whose ids PromptBuilder checks.

    Raises:
        ApiError: 400 that shows the first prompt that is neither text nor a list.
    """
    several = isinstance(value, list) and value and not any(type(item) is int for item in value)
    prompts: list[Any] = value if several else [value]  # type: ignore[assignment]
    for prompt in prompts:
        if not isinstance(prompt, str | list):
            problem = f"prompt has {shown(prompt)}; give text, token ids of at least 0, or a list"
            raise ApiError(400, problem, param="prompt")
    return prompts


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    endpoint = "/v1/completions"
    not_offered = NOT_OFFERED | {
        "tools": (),
        "documents": ([],),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
    }
    prompt: Annotated[list[str | list[Any]], PlainValidator(_as_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    add_special_tokens: bool = True
    # ``logprobs`` replaces these two (the second with ``echo``), so SamplingParams may not see a value out of range.
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool = False

    def check(self) -> None:
        """Reject what the base class rejects, and invalid combinations of fields that only completions have."""
        _check_tools(self.model_extra or {})
        super().check()
        if self.stream and self.num_generated > self.num_answers:
            problem = f"with n={self.num_answers} cannot be streamed"
            raise RequestError(problem, param="best_of", value=self.best_of, remedy="leave out stream")

    @property
    def requested_tokens(self) -> int | None:
        """The default of this endpoint is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompt_only(self) -> bool:
        """``max_tokens`` 0 with ``echo``."""
        return self.max_tokens == 0 and self.echo

    @property
    def num_generated(self) -> int:
        """``best_of``, if it is given."""
        return self.num_answers if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """A number turns them on."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt has as many as the answer."""
        given = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return -1 if -1 in given else max((number for number in given if number is not None), default=None)


class ChatRequest(Conversation, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    requires_thinking_budget: ClassVar[bool] = True  # reject a budget if the model's reasoning cannot be limited
    not_offered = NOT_OFFERED | {"best_of": (1,)}
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # SamplingParams does not see it beside the newer name
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call
    echo: bool = False  # the content starts with the message that is continued
    include_reasoning: bool = True
    prediction: Prediction | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None  # then reasoning is ended
    _thinking_budget: ThinkingBudget | None = PrivateAttr(default=None)

    def check(self) -> None:
        """Reject what the base class rejects, and invalid combinations of fields that only chat has."""
        super().check()
        if self.offered_tools and super().has_structured_output:
            param = "response_format" if self.structured_outputs is None else "structured_outputs"
            remedy = "leave one of them out, or set tool_choice to none"
            raise RequestError("cannot be combined with tools", param=param, remedy=remedy)

    @property
    def echoes(self) -> bool:
        """Whether the content starts with the final message, as in vLLM if that is the assistant's."""
        return self.echo and self.messages[-1].role == "assistant"

    @property
    def forces_calls(self) -> bool:
        """Whether the answer must be tool calls, which a grammar ensures."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def max_calls(self) -> int | None:
        """Maximum number of tool calls of an answer; None for any number."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def has_structured_output(self) -> bool:
        """Also if the choice of a tool forces one."""
        return self.forces_calls or super().has_structured_output

    @property
    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """The grammar that the request gives, or that the choice of a tool forces."""
        return (
            forced_calls(self.offered_tools, self.tool_choice, parallel=self.max_calls is None)
            or super().structured_outputs_params
        )

    def renamed(self, error: RequestError) -> RequestError:
        """As the base class; with tools, the grammar is made of them."""
        if error.param == "structured_outputs" and self.offered_tools:
            return error.renamed("tools")
        return super().renamed(error)

    @property
    def thinking_budget(self) -> ThinkingBudget | None:
        """``thinking_token_budget``, once the model's markers of reasoning are known; None with a structured output."""
        return None if self.has_structured_output else self._thinking_budget

    def with_thinking_budget(self, budget: ThinkingBudget | None) -> ChatRequest:
        """Return the request with its budget in the model's tokens."""
        request = self.model_copy()
        request._thinking_budget = budget
        return request

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` turns them on, ``top_logprobs`` says how many."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def requested_tokens(self) -> int | None:
        """``max_completion_tokens`` is the newer name of ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def field_names(self) -> Mapping[str, str]:
        """Chat has its own names for two parameters."""
        names = {**super().field_names, "logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _check_tools(extra: Mapping[str, Any]) -> None:
    if extra.get("tools") == []:
        raise RequestError("is empty", param="tools", remedy="give at least one tool or leave it out")
    if not extra.get("tools") and extra.get("tool_choice") not in (None, "none"):
        raise RequestError("needs tools", param="tool_choice", value=extra["tool_choice"], remedy="leave it out")

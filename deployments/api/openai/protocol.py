"""The OpenAI requests that Pagoda understands: their fields, and which fields can be combined.

Pydantic checks types and size limits, so that parsing a large body does not block the event loop. ``check`` rejects
combinations of fields that only the API has. Ranges of sampling parameters are checked once, when sampling.py builds
SamplingParams. Unknown fields are ignored, since clients send many. Parameters of the API that Pagoda does not offer
are rejected unless they have their neutral value. This module does not know how a request is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, PrivateAttr

from deployments.api.openai.messages import MAX_MESSAGES, Message, check_template_options
from deployments.api.openai.structured import reject_old_names, structured_outputs
from deployments.api.openai.tool_grammar import forced_calls
from deployments.api.openai.tools import Effort, NamedChoice, ToolChoice, Tools, check_size, check_tools
from deployments.errors import ApiError
from engine.errors import RequestError, shown
from engine.sampling_params import MAX_INT32, MAX_LOGPROBS, ThinkingBudget
from engine.structured_outputs.params import StructuredOutputsParams

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "Message", "StreamOptions"]

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Word = Annotated[str, Field(max_length=1000)]
Words = Annotated[list[Word], Field(fail_fast=True)]  # stops at the first error: a body may hold a million of them

# Parameters that are known but not offered, with their neutral values.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "beam_width": (),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "tools": (),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "logits_processors": ([],),
    "detokenize": (True,),
}
NOT_OFFERED_IN_CHAT: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,)}
OFFERED_IN_CHAT = ("tools", "documents")
MAX_DOCUMENTS = 1_000


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


class StreamOptions(_Body):
    """What a stream contains in addition to its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(_Body):
    """The fields that chat and completions have in common."""

    endpoint: ClassVar[str]
    _num_bytes: int = PrivateAttr(default=0)
    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_OFFERED
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Word | Words | None = None
    stop_token_ids: list[Any] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[Any] | None = None
    bad_words: Words | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    def check(self) -> None:
        """Reject invalid combinations of fields, and parameters that are not offered.

        Raises:
            RequestError: for an invalid combination.
            ApiError: 501 for a parameter that is known but not offered.
        """
        extra = self.model_extra or {}
        if self.stream_options is not None and not self.stream:
            raise RequestError("needs stream: true", param="stream_options", remedy="set it or leave it out")
        if self.top_logprobs is not None and self.num_logprobs is None:
            raise RequestError("needs logprobs", param="top_logprobs", value=self.top_logprobs, remedy="set both")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "cannot be streamed", param="prompt_logprobs", value=self.prompt_logprobs, remedy="leave out stream"
            )
        for name in ("chat_template", "chat_template_kwargs"):
            if extra.get(name):
                raise RequestError("cannot be set by a request", param=name, remedy="leave it out")
        reject_old_names(extra)
        self._check_offered(extra)

    @property
    def num_bytes(self) -> int:
        """Length of the JSON, which bounds the time that the request takes to prepare."""
        return self._num_bytes

    def was_parsed_from(self, num_bytes: int) -> None:
        """Set the length of the JSON."""
        self._num_bytes = num_bytes

    def _check_offered(self, extra: Mapping[str, Any]) -> None:
        for name, neutral in self.not_offered.items():
            value = extra.get(name)
            if value is not None and not _is_one_of(value, neutral):
                raise ApiError(501, f"{name}={shown(value)} is not offered yet; leave it out", param=name)

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of an answer; None is the rest of the context."""
        return self.max_tokens

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is the echoed prompt alone, to score it."""
        return False

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_generated(self) -> int:
        """Answers generated for each prompt; the best ``num_answers`` are returned."""
        return self.num_answers

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens returned with each generated token; None returns no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def field_names(self) -> Mapping[str, str]:
        """The field of this body that set an engine's parameter, where its name differs."""
        return {}

    @property
    def has_form(self) -> bool:
        """Whether the answer must have a form, which takes time to check."""
        return self.structured_outputs is not None or (self.response_format or {}).get("type") not in (None, "text")

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the answer must have.

        Raises:
            RequestError: if it is invalid.
        """
        return structured_outputs(self.response_format, self.structured_outputs)

    @property
    def thinking_budget(self) -> ThinkingBudget | None:
        """When reasoning is ended."""
        return None

    def renamed(self, error: RequestError) -> RequestError:
        """Return an error about a parameter of the engine as an error about the field of this body that set it."""
        if error.param == "structured_outputs" and self.structured_outputs is None:
            return error.renamed("response_format", "json_schema" if error.part == "json" else None)
        field = self.field_names.get(error.param or "")
        return error if field is None else error.renamed(field, error.part)


def _is_one_of(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether ``value`` is in ``neutral``, where False and 0 differ."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


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
    prompt: Annotated[list[str | list[Any]], PlainValidator(_as_prompts)]
    # ``logprobs`` replaces these two (the second with ``echo``), so SamplingParams may not see a value out of range.
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
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
        return max((number for number in given if number is not None), default=None)


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    requires_thinking_budget: ClassVar[bool] = True  # reject a budget if the model's reasoning cannot be limited
    not_offered = {name: NOT_OFFERED[name] for name in NOT_OFFERED if name not in OFFERED_IN_CHAT} | NOT_OFFERED_IN_CHAT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # SamplingParams does not see it beside the newer name
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # None: auto if there are tools
    parallel_tool_calls: bool | None = None  # false: at most one call
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None  # then reasoning is ended
    _thinking_budget: ThinkingBudget | None = PrivateAttr(default=None)

    def check(self) -> None:
        """Reject what the base class rejects, and invalid combinations of fields that only chat has."""
        super().check()
        check_tools(self.tools, self.tool_choice)
        check_size("documents", self.documents)
        check_template_options(self.chat_template_kwargs)
        if self.offered_tools and super().has_form:
            param = "response_format" if self.structured_outputs is None else "structured_outputs"
            remedy = "leave one of them out, or set tool_choice to none"
            raise RequestError("cannot be combined with tools", param=param, remedy=remedy)

    @property
    def offered_tools(self) -> Tools:
        """The tools that the answer may call: none with ``tool_choice`` none."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def forces_calls(self) -> bool:
        """Whether the answer must be tool calls, which a grammar ensures."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def max_calls(self) -> int | None:
        """Maximum number of tool calls of an answer; None for any number."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        options: dict[str, Any] = {}
        if self.offered_tools:
            options["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.offered_tools]
        if self.documents:
            options["documents"] = self.documents
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            options |= {"enable_thinking": False, "thinking": False}  # Qwen's and DeepSeek's names
        return options | (self.chat_template_kwargs or {})

    @property
    def has_form(self) -> bool:
        """Also if the choice of a tool forces one."""
        return self.forces_calls or super().has_form

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the request gives, or that the choice of a tool forces."""
        return forced_calls(self.offered_tools, self.tool_choice, parallel=self.max_calls is None) or super().form

    def renamed(self, error: RequestError) -> RequestError:
        """As the base class; beside tools, a form is made of them."""
        if error.param == "structured_outputs" and self.offered_tools:
            return error.renamed("tools")
        return super().renamed(error)

    @property
    def thinking_budget(self) -> ThinkingBudget | None:
        """``thinking_token_budget``, once the model's markers of reasoning are known; a form has no reasoning."""
        return None if self.has_form else self._thinking_budget

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
        names = {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _check_tools(extra: Mapping[str, Any]) -> None:
    if extra.get("tools") == []:
        raise RequestError("is empty", param="tools", remedy="give at least one tool or leave it out")
    if not extra.get("tools") and extra.get("tool_choice") not in (None, "none"):
        raise RequestError("needs tools", param="tool_choice", value=extra["tool_choice"], remedy="leave it out")

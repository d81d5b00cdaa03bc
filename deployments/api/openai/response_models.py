"""The responses of chat, completions and models as types, for the OpenAPI document and for tests.

The writers make plain dicts, which takes less time; tests check every one of them against these types. A field with a
default may be absent.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "ChatChunk",
    "ChatResponse",
    "CompletionChunk",
    "CompletionResponse",
    "ModelCard",
    "ModelList",
    "absent",
]

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class _Part(BaseModel):
    """A part of a response has the fields below and no others."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def absent() -> Any:
    """Return the default of a field that may be absent: no default that a schema would show."""
    return Field(default_factory=lambda: None)


class CachedTokens(_Part):
    """Prompt tokens that the prefix cache served."""

    cached_tokens: int


class Usage(_Part):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionTokens(_Part):
    """Tokens of the answers: those of reasoning, with its markers, and of the prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ChatUsage(Usage):
    """Token counts of chat answers."""

    completion_tokens_details: CompletionTokens


class RankedToken(_Part):
    """A token of ``prompt_logprobs``."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class TokenLogprob(_Part):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class PositionLogprobs(TokenLogprob):
    """A generated token and the most likely ones at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Part):
    """Log-probabilities of a chat choice."""

    content: list[PositionLogprobs]
    refusal: None


class CalledFunction(_Part):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class Call(_Part):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(_Part):
    """A part of a function's name or arguments."""

    name: str = absent()
    arguments: str = absent()


class CallDelta(_Part):
    """A part of a tool call; the first one of a call has its id and name."""

    index: int
    id: str = absent()
    type: Literal["function"] = absent()
    function: CalledFunctionDelta


class ChatMessage(_Part):
    """The message of a whole chat choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = absent()
    reasoning_content: str = absent()
    tool_calls: list[Call] = absent()


class ChatDelta(_Part):
    """What a chunk adds to a message."""

    role: Literal["assistant"] = absent()
    content: str = absent()
    reasoning: str = absent()
    reasoning_content: str = absent()
    tool_calls: list[CallDelta] = absent()


class _Ending(_Part):
    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = absent()
    prompt_token_ids: list[int] | None = absent()


class _DeltaEnding(_Part):
    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = absent()
    prompt_token_ids: list[int] | None = absent()


class ChatChoice(_Ending):
    """One answer of a whole chat response."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_DeltaEnding):
    """What a chunk adds to one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class CompletionLogprobs(_Part):
    """Log-probabilities of a completion choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Ending):
    """One answer of a whole completion response."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None


class CompletionChunkChoice(_DeltaEnding):
    """What a chunk adds to one answer."""

    text: str
    logprobs: CompletionLogprobs | None


class _Response(_Part):
    id: str
    created: int
    model: str


class ChatResponse(_Response):
    """A whole chat response."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None = absent()


class ChatChunk(_Response):
    """An event of a streamed chat response. The last one may have the usage and no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: ChatUsage | None = absent()
    prompt_token_ids: list[int] | None = absent()


class CompletionResponse(_Response):
    """A whole completion response."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Response):
    """An event of a streamed completion response. The last one may have the usage and no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = absent()


class ModelCard(_Part):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    task: Literal["generate", "embed", "score"]


class ModelList(_Part):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]

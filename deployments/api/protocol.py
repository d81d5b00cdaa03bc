"""The OpenAI requests that Pagoda understands: their fields and what fits together.

A body is checked once. What is out of range is refused; only max_tokens is clamped, to what the context leaves. Ranges
that the engine knows are its own SamplingParams' business (sampling.py makes them). Fields that nobody knows are
ignored, since clients send many; parameters of the API that are not offered are refused when they ask for something. It
knows nothing of how a request is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from deployments.api.structured import refuse_old_names
from deployments.errors import ApiError
from engine.errors import shown
from engine.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "Message", "StreamOptions"]

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
# Lists and words are bounded, and checked up to their first mistake: a body of a million of them must not hold up the
# event loop.
Word = Annotated[str, Field(max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedTokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopStrings = Annotated[list[Word], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
BadWords = Annotated[list[Word], Field(fail_fast=True)]
MAX_MESSAGES = 10_000
MAX_PARTS = 1_000

# Parameters that are known but not offered, with the values that ask for nothing.
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


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


class StreamOptions(_Body):
    """What a stream carries besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(_Body):
    """What chat and completions have in common."""

    endpoint: ClassVar[str]
    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_OFFERED
    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: Word | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
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
    n: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    top_logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse combinations that no single field shows, and what is not offered.

        Raises:
            ApiError: 400, or 501 for a parameter that is known but not offered.
        """
        extra = self.model_extra or {}
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true; set it or leave it out", param="stream_options")
        if self.top_logprobs is not None and self.num_logprobs is None:
            raise ApiError(400, f"top_logprobs={self.top_logprobs} needs logprobs; ask for both", param="top_logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(
                400,
                f"prompt_logprobs={self.prompt_logprobs} cannot be streamed; leave out stream",
                param="prompt_logprobs",
            )
        _check_tools(extra)
        for name in ("chat_template", "chat_template_kwargs"):
            if extra.get(name):
                raise ApiError(400, f"{name}: a request cannot bring a template of its own; leave it out", param=name)
        refuse_old_names(extra)
        self._check_offered(extra)

    def _check_offered(self, extra: Mapping[str, Any]) -> None:
        for name, neutral in self.not_offered.items():
            value = extra.get(name)
            if value is not None and not _is_one_of(value, neutral):
                raise ApiError(501, f"{name}={shown(value)} is not offered yet; leave it out", param=name)

    @property
    def requested_tokens(self) -> int | None:
        """How many tokens are asked for; None is what is left of the context."""
        return self.max_tokens

    @property
    def num_answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_draws(self) -> int:
        """Answers generated for each prompt, of which the best are given."""
        return self.num_answers

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told of each generated token; None tells no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs


def _is_one_of(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether ``value`` is in ``neutral``; False and 0 are not the same."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _as_prompts(value: object) -> list[str | list[int]]:
    """Return the prompts one by one; a list of ids is one prompt.

    Raises:
        ApiError: 400 that shows the first thing that is neither text nor ids.
    """
    several = isinstance(value, list) and not any(type(item) is int for item in value)
    prompts: list[Any] = value if several else [value]  # type: ignore[assignment]
    for prompt in prompts:
        if not isinstance(prompt, str) and not _are_ids(prompt):
            parts = prompt if isinstance(prompt, list) else [prompt]
            wrong = shown(next((part for part in parts if not _are_ids([part])), prompt))
            raise ApiError(400, f"prompt has {wrong}; give text, token ids of at least 0, or a list", param="prompt")
    return prompts


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    endpoint = "/v1/completions"
    prompt: Annotated[list[str | list[int]], PlainValidator(_as_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Count | None = None
    logprobs: NumLogprobs | None = None
    echo: bool = False

    def check(self) -> None:
        """Refuse what the base class does, and combinations that only completions have."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 asks for nothing without echo: true; give at least 1", param="max_tokens")
        if self.num_draws < self.num_answers:
            raise ApiError(400, f"best_of={self.best_of} is less than n={self.n}; raise it", param="best_of")
        if self.stream and self.num_draws > self.num_answers:
            raise ApiError(
                400,
                f"best_of={self.best_of} with n={self.num_answers} cannot be streamed; leave out stream",
                param="best_of",
            )

    @property
    def requested_tokens(self) -> int | None:
        """The API's own default here is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_draws(self) -> int:
        """``best_of``, if it is given."""
        return self.best_of or self.num_answers

    @property
    def num_logprobs(self) -> int | None:
        """A number turns them on."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """A prompt that is echoed has as many as the answer."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)


class TextPart(_Body):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template sees.

        Raises:
            ApiError: 501 for parts that are not text.
        """
        extra = self.model_extra or {}
        for name in ("tool_calls", "function_call"):
            if extra.get(name):
                raise ApiError(501, f"messages: {name} is not offered yet; leave it out", param="messages")
        if self.content is None or isinstance(self.content, str):
            return {"role": self.role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(501, f"messages: content of type {shown(part.type)} is not offered", param="messages")
        return {"role": self.role, "content": "\n".join(part.text or "" for part in self.content)}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    not_offered = NOT_OFFERED | NOT_OFFERED_IN_CHAT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` turns them on, ``top_logprobs`` says how many."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def requested_tokens(self) -> int | None:
        """``max_completion_tokens`` is the newer name of ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _check_tools(extra: Mapping[str, Any]) -> None:
    if extra.get("tools") == []:
        raise ApiError(400, "tools is empty; give at least one tool or leave it out", param="tools")
    if not extra.get("tools") and extra.get("tool_choice") not in (None, "none"):
        raise ApiError(400, f"tool_choice={shown(extra['tool_choice'])} is given without tools", param="tool_choice")

"""The OpenAI requests that Pagoda understands: their fields, ranges and defaults.

A body is checked once here; what is out of range is refused and never clamped. Fields that nobody knows are ignored,
since clients send many; parameters of the API that are not offered yet are refused when they ask for something. It
knows nothing of how a request is served.
"""

from __future__ import annotations

import json
import reprlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from deployments.errors import ApiError
from engine.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "Message", "StreamOptions", "parse_body"]

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
StopString = Annotated[str, Field(max_length=1000)]
# Lists are bounded, and checked up to their first mistake: a body of a million of them must not hold up the event loop.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
MAX_MESSAGES = 10_000
MAX_PARTS = 1_000

# Parameters that are known but not offered, with the values that ask for nothing.
_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": (),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "length_penalty": (1,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


class StreamOptions(_Body):
    """What a stream carries besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(_Body):
    """What chat and completions have in common."""

    endpoint: ClassVar[str]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
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
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def check(self) -> None:
        """Refuse combinations that no single field shows, and what is not offered.

        Raises:
            ApiError: 400, or 501 for a parameter that is known but not offered.
        """
        extra = self.model_extra or {}
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true; set it or leave it out", param="stream_options")
        if (self.n or 1) > 1 and self.temperature == 0:
            raise ApiError(400, f"n={self.n} at temperature 0 gives equal answers; raise temperature", param="n")
        if self.top_logprobs is not None and not extra.get("logprobs"):
            raise ApiError(400, f"top_logprobs={self.top_logprobs} needs logprobs: true", param="top_logprobs")
        _check_tools(extra)
        for name in ("chat_template", "chat_template_kwargs"):
            if extra.get(name):
                raise ApiError(400, f"{name}: a request cannot bring a template of its own; leave it out", param=name)
        for name in extra:
            if name.startswith("guided_") and extra[name] is not None:
                raise ApiError(400, f"{name} is an old name of structured_outputs, not offered yet", param=name)
        self._check_offered(extra)

    def _check_offered(self, extra: Mapping[str, Any]) -> None:
        for name, neutral in _NOT_OFFERED.items():
            value = getattr(self, name) if name in type(self).model_fields else extra.get(name)
            if value is not None and not _is_one_of(value, neutral):
                raise ApiError(501, f"{name}={_shown(value)} is not offered yet; leave it out", param=name)

    def sampling_params(self, defaults: Mapping[str, Any], room: int) -> SamplingParams:
        """Return the sampling parameters, with the model's own ``defaults`` and at most ``room`` tokens.

        Raises:
            RequestError: for a value out of range.
        """
        chosen = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: value for name, value in chosen.items() if value is not None}
        limit = self.requested_tokens
        params = SamplingParams(
            **{**defaults, **given},
            # A seed in any case: a stream that goes on at another replica draws there as it would have here.
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            max_tokens=limit,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )
        return params if limit is not None and limit <= room else _clamped(params, room)

    @property
    def requested_tokens(self) -> int | None:
        """How many tokens are asked for; None is what is left of the context."""
        return self.max_tokens


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
            shown = _shown(next((part for part in parts if not _are_ids([part])), prompt))
            raise ApiError(400, f"prompt has {shown}; give text, token ids of at least 0, or a list", param="prompt")
    return prompts


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    endpoint = "/v1/completions"
    prompt: Annotated[list[str | list[int]], PlainValidator(_as_prompts)]

    @property
    def requested_tokens(self) -> int | None:
        """The API's own default here is 16."""
        return 16 if self.max_tokens is None else self.max_tokens


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
                raise ApiError(501, f"messages: content of type {_shown(part.type)} is not offered", param="messages")
        return {"role": self.role, "content": "\n".join(part.text or "" for part in self.content)}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def requested_tokens(self) -> int | None:
        """``max_completion_tokens`` is the newer name of ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


RequestType = TypeVar("RequestType", bound=GenerationRequest)


def parse_body(kind: type[RequestType], body: bytes) -> RequestType:
    """Return the request in ``body``.

    Raises:
        ApiError: 400 that names the parameter and its value; 501 for what is not offered.
    """
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}", code="invalid_json")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error, fields) from None
    request.check()
    return request


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_tools(extra: Mapping[str, Any]) -> None:
    if extra.get("tools") == []:
        raise ApiError(400, "tools is empty; give at least one tool or leave it out", param="tools")
    if not extra.get("tools") and extra.get("tool_choice") not in (None, "none"):
        raise ApiError(400, f"tool_choice={_shown(extra['tool_choice'])} is given without tools", param="tool_choice")


def _clamped(params: SamplingParams, room: int) -> SamplingParams:
    """Return ``params`` with max_tokens cut down to ``room``; min_tokens cannot exceed it."""
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _as_api_error(error: ValidationError, fields: Mapping[str, Any]) -> ApiError:
    """Return one line for the field that pydantic found wrong first."""
    errors = error.errors(include_url=False)
    if not errors[0]["loc"]:  # the mistake is in a key
        return ApiError(400, f"the body is refused: {errors[0]['msg'].lower()}", code="invalid_json")
    name = str(errors[0]["loc"][0])
    if errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1:
        return ApiError(400, f"{name} is missing; give it", param=name)
    # Of a union's branches the one that got deepest says best what is wrong.
    first = max((item for item in errors if item["loc"][0] == name), key=lambda item: len(item["loc"]))
    where = name + "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    value = first["input"] if first["type"] != "missing" else fields[name]
    return ApiError(400, f"{where}={_shown(value)} is refused: {first['msg'][0].lower()}{first['msg'][1:]}", param=name)


def _shown(value: object) -> str:
    text = (
        reprlib.repr(value)
        if isinstance(value, list | dict)
        else repr(value[:100] if isinstance(value, str) else value)
    )
    return text if len(text) <= 80 else text[:77] + "..."

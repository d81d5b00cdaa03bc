"""GenerationRequest: the fields that the bodies of chat and completions have in common.

Pydantic checks types and size limits, so that parsing a large body does not block the event loop. ``check`` rejects
combinations of fields that only the API has. Ranges of sampling parameters are checked once, when sampling.py builds
SamplingParams. Unknown fields are ignored, since clients send many. Parameters of the API that Pagoda does not offer
are rejected unless they have their neutral value. This module does not know how a request is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from deployments.api.body import JsonBody
from deployments.api.openai.structured import reject_old_names, structured_outputs
from deployments.errors import ApiError
from engine.errors import RequestError, shown
from engine.options.structured_outputs import StructuredOutputsParams
from engine.options.thinking_budget import ThinkingBudget
from engine.request import MAX_RETENTION

__all__ = ["NOT_OFFERED", "GenerationRequest", "StreamOptions", "Words"]

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Word = Annotated[str, Field(max_length=1000)]
Words = Annotated[list[Word], Field(fail_fast=True)]  # stops at the first error: a body may hold a million of them
TokenIds = Annotated[list[Any], Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})]

# Parameters that are known but not offered, with their neutral values.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "beam_width": (),
    "early_stopping": (False,),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "logits_processors": ([],),
    "detokenize": (True,),
}


class StreamOptions(JsonBody):
    """What a stream contains in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(JsonBody):
    """The fields that chat and completions have in common."""

    endpoint: ClassVar[str]
    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_OFFERED
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Word | Words | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None  # only says that the prompt comes again
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds | None = None  # their log-probabilities replace those of the most likely tokens
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities, a token is written as token_id:N
    use_beam_search: bool = False  # with n beams
    length_penalty: float = 1.0
    truncate_prompt_tokens: int | None = None  # -1: as many as leave room for max_tokens
    truncation_side: Literal["left", "right"] | None = None  # where tokens are cut off: left if it is None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def retention(self) -> int:
        """How long the prompt's blocks are worth keeping: ``EngineRequest.retention``."""
        if self.prompt_cache_retention == "24h":
            return MAX_RETENTION
        return int(bool(self.prompt_cache_key or self.prompt_cache_retention))

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
        self._check_beams()
        for name in ("chat_template", "chat_template_kwargs"):
            if extra.get(name):
                raise RequestError("cannot be set by a request", param=name, remedy="leave it out")
        reject_old_names(extra)
        self._check_offered(extra)

    def _check_beams(self) -> None:
        if self.use_beam_search and self.stream:
            raise RequestError("cannot be streamed", param="use_beam_search", remedy="leave out stream")
        if self.use_beam_search and self.prompt_only:
            raise RequestError("needs max_tokens of at least 1", param="use_beam_search", remedy="raise max_tokens")
        if self.length_penalty != 1.0 and not self.use_beam_search:
            raise RequestError(
                "needs use_beam_search", param="length_penalty", value=self.length_penalty, remedy="set it to true"
            )

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
        """Most likely tokens returned with each generated token; -1 for all, None returns no log-probabilities."""
        return None

    @property
    def num_shown_logprobs(self) -> int | None:
        """Tokens shown with each generated token: the most likely ones, or those of ``logprob_token_ids``; -1: all."""
        if self.num_logprobs is None or self.logprob_token_ids is None:
            return self.num_logprobs
        return 1 + len(self.logprob_token_ids)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def field_names(self) -> Mapping[str, str]:
        """The field of this body that set an engine's parameter, where its name differs."""
        return {"beam_width": "n"}

    @property
    def has_structured_output(self) -> bool:
        """Whether a grammar limits the answer; compiling it takes time."""
        return self.structured_outputs is not None or (self.response_format or {}).get("type") not in (None, "text")

    @property
    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """The grammar that limits the answer.

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
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)

"""From a validated request to the engine's SamplingParams: once a request, then for each prompt and each answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployments.api.protocol import GenerationRequest
from deployments.api.structured import structured_outputs
from deployments.config import LimitOptions
from deployments.errors import ApiError
from engine.errors import RequestError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

__all__ = ["for_answers", "for_prompt", "require_few_answers", "sampling_params", "with_bad_words"]

_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def require_few_answers(request: GenerationRequest, num_prompts: int, limits: LimitOptions) -> None:
    """Refuse a request for more answers than one client may have.

    Raises:
        ApiError: 400 with the number and the limit.
    """
    n, draws = request.num_answers, request.num_draws
    if n > limits.max_n:
        raise ApiError(400, f"n={n} exceeds this server's limit of {limits.max_n}; lower it", param="n")
    if draws > max(n, limits.max_best_of):
        limit = limits.max_best_of
        raise ApiError(400, f"best_of={draws} exceeds this server's limit of {limit}; lower it", param="best_of")
    if draws > 1 and num_prompts * draws > limits.max_prompts_per_request:
        raise ApiError(
            400,
            f"{num_prompts} prompts with {draws} answers each exceed the limit of {limits.max_prompts_per_request} "
            "answers; send fewer prompts",
            param="prompt",
        )


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that all prompts have in common, over the model's own ``defaults``.

    Raises:
        RequestError: for a value out of range, which it names.
    """
    fields = {name: getattr(request, name) for name in _NAMES}
    given = {name: value for name, value in fields.items() if value is not None}
    is_ranked = request.num_draws > request.num_answers
    if request.prompt_only and request.min_tokens:
        raise RequestError("exceeds max_tokens=0", param="min_tokens", value=request.min_tokens, remedy="lower it")
    try:
        return SamplingParams(
            **{**defaults, **given},
            best_of=None if request.num_draws == request.num_answers else request.num_draws,
            # An engine generates at least one token; Generation drops it.
            max_tokens=1 if request.prompt_only else request.requested_tokens,
            logprobs=0 if is_ranked and request.num_logprobs is None else request.num_logprobs,
            prompt_logprobs=request.num_prompt_logprobs,
            structured_outputs=structured_outputs(request.response_format, request.structured_outputs),
        )
    except RequestError as error:
        raise request.renamed(error) from None


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer, *, vocab_size: int) -> SamplingParams:
    """Return ``params`` with the bad words as token ids; a spelling that the model cannot generate is none.

    Raises:
        RequestError: for a word that is too long, or no valid text.
    """
    try:
        spellings = tokenizer.bad_words_token_ids(params.bad_words or ())
        known = tuple(ids for ids in spellings if max(ids) < vocab_size)
        return replace(params, bad_words_token_ids=known)
    except RequestError as error:
        raise error.renamed("bad_words") from None


def for_prompt(params: SamplingParams, room: int) -> SamplingParams:
    """Return ``params`` with at most ``room`` tokens and, as each prompt draws its own, with a seed."""
    # A seed in any case: a stream that goes on at another replica draws there as it would have here.
    seed = secrets.randbits(62) if params.seed is None else params.seed
    if params.max_tokens is not None and params.max_tokens <= room:
        return replace(params, seed=seed)
    return replace(params, seed=seed, max_tokens=room, min_tokens=min(params.min_tokens, room))


def for_answers(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each answer by itself: answer ``i`` has the seed plus ``i``, as within an engine."""
    if params.num_sequences == 1:
        return [params]
    assert params.seed is not None
    seeds = [_int64(params.seed + index) for index in range(params.num_sequences)]
    return [replace(params, n=1, best_of=None, seed=seed) for seed in seeds]


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63

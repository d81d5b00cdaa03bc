"""Builds SamplingParams: for a request, then for each of its prompts, then for each answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

from msgspec.structs import replace

from deployments.api.openai.protocol import GenerationRequest
from deployments.config import LimitOptions
from deployments.requests.prompt import Prompt
from engine.config import EngineInfo
from engine.errors import RequestError
from engine.sampling_params import REJECTED_WITH_BEAMS, SamplingParams
from engine.text.tokenizer import Tokenizer

__all__ = ["check_num_answers", "params_of_prompts", "sampling_params"]


class Builder(Protocol):
    """What is known of the engines, and the tokenizer; see PromptBuilder."""

    info: EngineInfo

    @property
    def max_total_tokens(self) -> int:
        """Maximum tokens of prompt and answer together."""

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError for an id outside the vocabulary, or too many log-probabilities."""

    async def run_with_tokenizer(self, work: Callable[[Tokenizer], Any], *, cost: int) -> Any:
        """Run ``work`` with a tokenizer, in the background if ``cost`` is high."""


async def params_of_prompts(
    request: GenerationRequest, prompts: Sequence[Prompt], builder: Builder, limits: LimitOptions
) -> list[list[SamplingParams]]:
    """Return for each prompt the parameters of its engine requests: one for each answer, or one for a beam search.

    Raises:
        RequestError: for a value out of range, an id outside the vocabulary, too many log-probabilities or answers.
    """
    check_num_answers(request, len(prompts), limits)
    defaults, cost = builder.info.default_sampling, request.num_bytes if request.has_structured_output else 0
    common: SamplingParams = await builder.run_with_tokenizer(lambda _: sampling_params(request, defaults), cost=cost)
    if common.bad_words:
        work = partial(_with_bad_words, common, vocab_size=builder.info.vocab_size)
        common = await builder.run_with_tokenizer(work, cost=sum(map(len, common.bad_words)))
    try:
        builder.check_params(common)
    except RequestError as error:
        raise request.renamed(error) from None
    rooms = [builder.max_total_tokens - len(prompt.token_ids) for prompt in prompts]
    return [
        _of_answers(_of_prompt(common, room, needs_seed=index > 0 and request.seed is None))
        for index, room in enumerate(rooms)
    ]


def check_num_answers(request: GenerationRequest, num_prompts: int, limits: LimitOptions) -> None:
    """Reject a request for more answers than the server's limits allow.

    Raises:
        RequestError: with the number and the limit.
    """
    n, best_of = request.num_answers, request.num_generated
    if n > limits.max_n:
        raise RequestError(f"exceeds this server's limit of {limits.max_n}", param="n", value=n, remedy="lower it")
    if best_of > max(n, limits.max_best_of):
        limit = limits.max_best_of
        raise RequestError(f"exceeds this server's limit of {limit}", param="best_of", value=best_of, remedy="lower it")
    if best_of > 1 and num_prompts * best_of > limits.max_prompts_per_request:
        limit = limits.max_prompts_per_request
        problem = f"has {num_prompts} prompts with {best_of} answers each, which exceed the limit of {limit} answers"
        raise RequestError(problem, param="prompt", remedy="send fewer prompts")


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a request's first prompt; ``defaults`` are the model's.

    They always have a seed: a stream that continues on another replica then samples the same tokens there.

    Raises:
        RequestError: for a value out of range; it names the field of the request.
    """
    given = {name: value for name in _common_fields(type(request)) if (value := getattr(request, name)) is not None}
    if request.prompt_only and request.min_tokens:
        raise RequestError("exceeds max_tokens=0", param="min_tokens", value=request.min_tokens, remedy="lower it")
    try:
        given |= {
            "best_of": None if request.num_generated == request.num_answers else request.num_generated,
            # An engine generates at least one token; Generation drops it.
            "max_tokens": 1 if request.prompt_only else request.requested_tokens,
            "logprobs": _num_logprobs(request),
            "prompt_logprobs": request.num_prompt_logprobs,
            "structured_outputs": request.structured_outputs_params,
            "thinking_budget": request.thinking_budget,
        }
        if request.use_beam_search:
            return _beams(request, given)
        return SamplingParams(**{"seed": _new_seed(), **defaults, **given})
    except RequestError as error:
        raise request.renamed(error) from None


@cache
def _common_fields(kind: type[GenerationRequest]) -> tuple[str, ...]:
    """Return the fields of a body that are sampling parameters of the same name."""
    return tuple(name for name in SamplingParams.__struct_fields__ if name in kind.model_fields)


def _num_logprobs(request: GenerationRequest) -> int | None:
    """Return how many of the most likely tokens the engine returns with each token; -1 for all."""
    if request.num_logprobs is None:  # best_of ranks answers by those of their own tokens
        return 0 if request.num_generated > request.num_answers else None
    return request.num_logprobs if request.logprob_token_ids is None else 0


def _beams(request: GenerationRequest, given: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a beam search with ``n`` beams; the model's own defaults are for sampling.

    Raises:
        RequestError: for a parameter that cannot be combined with a beam search.
    """
    for name, neutral in REJECTED_WITH_BEAMS.items():
        value = given.get(name)
        if value is not None and value != [] and value not in neutral:
            remedy = "set temperature to 0" if name == "temperature" else "leave one of them out"
            shown = {} if name == "structured_outputs" else {"value": value}
            raise RequestError("cannot be combined with use_beam_search", param=name, remedy=remedy, **shown)
    width = request.num_answers
    search = {"temperature": 0.0, "n": width, "beam_width": width, "length_penalty": request.length_penalty}
    return SamplingParams(**{**given, **search})


def _with_bad_words(params: SamplingParams, tokenizer: Tokenizer, *, vocab_size: int) -> SamplingParams:
    """Return ``params`` with the token ids of the bad words, without spellings that the model cannot generate.

    Raises:
        RequestError: for a word that is too long, or is not valid text.
    """
    try:
        spellings = tokenizer.bad_words_token_ids(params.bad_words or ())
        known = tuple(ids for ids in spellings if max(ids) < vocab_size)
        return replace(params, bad_words_token_ids=known)
    except RequestError as error:
        raise error.renamed("bad_words") from None


def _of_prompt(params: SamplingParams, room: int, *, needs_seed: bool) -> SamplingParams:
    """Return ``params`` with at most ``room`` tokens, and with another seed if the prompt needs one of its own."""
    seed = _new_seed() if needs_seed else params.seed
    if params.max_tokens is not None and params.max_tokens <= room:
        return replace(params, seed=seed) if needs_seed else params
    return replace(params, seed=seed, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _of_answers(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each engine request: answer ``i`` has the seed plus ``i``, as in an engine.

    A beam search is one request, whatever the number of its answers.
    """
    if params.num_sequences == 1 or params.uses_beam_search:
        return [params]
    assert params.seed is not None
    seeds = [_int64(params.seed + index) for index in range(params.num_sequences)]
    return [replace(params, n=1, best_of=None, seed=seed) for seed in seeds]


def _new_seed() -> int:
    return secrets.randbits(62)


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63

"""generations_of: the engine requests of one body, each as the Generation of its answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msgspec.structs import replace

from deployments.api.openai.protocol import GenerationRequest
from deployments.api.prompts import PromptBuilder
from deployments.api.sampling import params_of_prompts
from deployments.config import LimitOptions
from deployments.request_log.record import current_record
from deployments.requests.beams import BestBeam, OtherBeam, join_beams
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.generation import Generation
from deployments.requests.prompt import Prompt
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

__all__ = ["generations_of"]


async def generations_of(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    builder: PromptBuilder,
    dispatcher: Dispatcher,
    limits: LimitOptions,
) -> list[Generation]:
    """Return one Generation for each answer, the answers to one prompt next to each other.

    Each answer is an engine request of its own, so that each survives the loss of its replica by itself. The prefix
    cache computes their prompt once.

    Raises:
        RequestError: for a parameter out of range, or too many answers.
    """
    generations: list[Generation] = []

    def add(prompt: Prompt, params: SamplingParams, kind: type[Generation] = Generation) -> Generation:
        generation = kind(
            dispatcher,
            _engine_request(body, prompt, params),
            prompt,
            builder.text_stream(prompt, params),
            index=len(generations),
            prompt_only=body.prompt_only,
            max_migrations=limits.max_migrations,
            keeps_logprobs=not body.stream,
        )
        generations.append(generation)
        return generation

    for prompt, answers in zip(prompts, await params_of_prompts(body, prompts, builder, limits), strict=True):
        for params in answers:
            if params.uses_beam_search:
                join_beams([add(prompt, params, kind) for kind in (BestBeam, *[OtherBeam] * (params.n - 1))])
            else:
                add(prompt, params)
    return generations


def _engine_request(body: GenerationRequest, prompt: Prompt, params: SamplingParams) -> EngineRequest:
    return replace(
        prompt.request,
        request_id=uuid.uuid4().hex,
        params=params,
        priority=body.priority,
        client=current_record().client,
    )

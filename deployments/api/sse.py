"""Server-sent events: a streamed answer as chunks of all choices, the usage, and how it ended."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from deployments.api.error_responses import noted_api_error
from deployments.api.protocol import GenerationRequest
from deployments.api.responses import Format, usage
from deployments.requests.generation import Delta, Generation
from deployments.requests.merge import merge

__all__ = ["stream_events"]

DONE = b"data: [DONE]\n\n"


async def stream_events(
    form: Format, generations: Sequence[Generation], body: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events. An error before the first event is raised, a later one becomes an event."""
    started: set[int] = set()  # the choices that have had a chunk
    try:
        async with aclosing(merge([generation.deltas() for generation in generations])) as deltas:
            async for delta in deltas:
                yield _chunk(form, generations, delta, body, first=delta.index not in started)
                started.add(delta.index)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event(form.usage_chunk(usage(generations, body.num_draws)))
    except Exception as error:
        if not started:
            raise
        yield _event(noted_api_error(error).body)
    yield DONE


def _chunk(
    form: Format, generations: Sequence[Generation], delta: Delta, body: GenerationRequest, *, first: bool
) -> bytes:
    chunk = form.delta_chunk(delta, generations[delta.index], first=first)
    options = body.stream_options
    if options is not None and options.continuous_usage_stats:
        chunk["usage"] = usage(generations, body.num_draws)
    elif options is not None and options.include_usage:
        chunk["usage"] = None
    return _event(chunk)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

"""An answer as server-sent events: the chunks of all choices as they come, the usage, and how it ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from deployments.api.protocol import GenerationRequest
from deployments.api.responses import DONE, Format, sse, usage
from deployments.errors import as_api_error
from deployments.requests.generation import Delta, Generation
from deployments.requests.merge import merge
from deployments.requests.record import note_error

__all__ = ["stream_events"]


async def stream_events(
    form: Format, generations: Sequence[Generation], body: GenerationRequest
) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events; an error after the first one becomes an event of its own."""
    started: set[int] = set()
    try:
        async with aclosing(merge([generation.deltas() for generation in generations])) as deltas:
            async for index, delta in deltas:
                yield _chunk(form, generations, index, delta, body, first=index not in started)
                started.add(index)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield sse(form.usage_chunk(usage(generations, body.num_draws)))
    except Exception as error:
        if not started:
            raise
        answer = as_api_error(error)
        note_error(answer)
        yield sse(answer.body)
    yield DONE


def _chunk(
    form: Format, generations: Sequence[Generation], index: int, delta: Delta, body: GenerationRequest, *, first: bool
) -> bytes:
    chunk = form.delta_chunk(index, delta, generations[index], first=first)
    options = body.stream_options
    if options is not None and options.continuous_usage_stats:
        chunk["usage"] = usage(generations, body.num_draws)
    elif options is not None and options.include_usage:
        chunk["usage"] = None
    return sse(chunk)

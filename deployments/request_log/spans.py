"""The content of a request's spans: attributes of the request's own span, and the phases of each attempt.

Attributes have the names of OpenTelemetry's conventions for generative AI, latencies those of vLLM; our own names start
with ``pagoda``. Nothing here imports OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deployments.request_log.record import RequestRecord
from deployments.transport.request_channel.dispatch import Dispatch

__all__ = ["Phase", "phases", "request_attributes"]

MAX_TRACED_ANSWERS = 16  # of one request, which may have a thousand answers


def request_attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    """Return the attributes of the request's own span."""
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": record.path,
        "gen_ai.provider.name": "pagoda",
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.e2e": record.e2e_s,
        "pagoda.migrations": record.num_migrations,
    }
    if record.sent_status:
        attributes["http.response.status_code"] = record.sent_status
    if record.status >= 400:
        attributes["error.type"] = "client_closed_request" if record.client_disconnected else record.reason
    if record.generations:
        attributes |= _generation_attributes(record, model)
    return attributes


def _generation_attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.model": model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.request.choice.count": record.num_answers,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "pagoda.replica": record.replica,
    }
    if (params := record.generations[0].params) is not None:
        attributes |= {"gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p}
    optional = {
        "gen_ai.request.max_tokens": None if params is None else params.max_tokens,
        "gen_ai.request.seed": record.seed,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
    }
    attributes |= {name: value for name, value in optional.items() if value is not None}
    return attributes | _latency_attributes(record)


def _latency_attributes(record: RequestRecord) -> dict[str, float]:
    """Return the engines' times for the first answer, summed over its attempts."""
    timings = [attempt.timing for attempt in record.generations[0].attempts if attempt.timing is not None]
    if not timings:
        return {}
    prefill_s, decode_s = sum(timing.prefill_s for timing in timings), sum(timing.decode_s for timing in timings)
    return {
        "gen_ai.latency.time_in_queue": sum(timing.queue_s for timing in timings),
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
    }


@dataclass(slots=True)
class Phase:
    """A part of one attempt. Times are seconds of the monotonic clock."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]
    has_failed: bool = False


def phases(record: RequestRecord) -> Iterator[Phase]:
    """Yield the phases of each answer, attempt by attempt."""
    for answer, generation in enumerate(record.generations[:MAX_TRACED_ANSWERS]):
        for number, attempt in enumerate(generation.attempts):
            common = {"pagoda.replica": attempt.replica, "pagoda.attempt": number, "pagoda.answer": answer}
            parts = [Phase(name, start, end, dict(common)) for name, start, end in _intervals(attempt, record.ended)]
            for part in parts:
                if part.name == "prefill":
                    part.attributes["pagoda.cached_tokens"] = attempt.num_cached_tokens
                elif part.name == "decode":
                    part.attributes["gen_ai.usage.output_tokens"] = attempt.num_tokens
            if attempt.error:
                parts[-1].has_failed, parts[-1].attributes["error.type"] = True, attempt.error
            yield from parts


def _intervals(attempt: Dispatch, now: float) -> Iterator[tuple[str, float, float]]:
    """Yield (phase, start, end) in order, without overlaps."""
    started, end, sent = attempt.started, attempt.ended or now, attempt.sent_at
    first = attempt.first_token
    if first is None:  # it may have been queued or in prefill at the end; the engine has not reported it
        yield "route", started, min(sent, end)
        if sent < end:
            yield "queue", sent, end
        return
    timing = attempt.timing
    prefill = max(started, first - timing.prefill_s) if timing is not None else first
    queue = max(started, prefill - timing.queue_s) if timing is not None else min(sent, first)
    yield "route", started, min(sent, queue)
    yield "queue", queue, prefill
    yield "prefill", prefill, first
    last = max(first, attempt.last_token or first)
    if timing is not None and timing.decode_s:
        last = min(last, first + timing.decode_s)
    yield "decode", first, last

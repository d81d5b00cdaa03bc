"""Tracer: turns the record of a request that has ended into OpenTelemetry spans.

    chat pagoda-demo                      the request, a child of the caller's span if it sent a ``traceparent``
      route                               until a replica was chosen
      queue                               until the engine's first step for it
      prefill                             until the first token
      decode                              until the last one

A request that was moved to another replica has the four once an attempt, one with several answers once an answer.

All spans are made in the ingress. The engine's queue, prefill and decode come back as durations, with the first batch
of tokens and with the last one, and are laid out backwards and forwards from when the first batch arrived on the
ingress's clock: nothing is exported from replicas, and hosts whose clocks differ cannot make a child begin before its
parent. What lies between route and queue is the way there and back, and the step that ran when the request came. The
durations are always sent (they are two small objects a request); spans cost something only when tracing is on, and then
after the answer.

The provider is our own: Ray's tracing, or whatever else a program has set globally, is neither used nor disturbed. The
SDK is imported only when it is needed. Prompts and answers are never part of a span (spans.py says what is).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from deployments.requests.record import OPERATIONS, RequestRecord
from deployments.requests.spans import phases, request_attributes
from deployments.version import pagoda_version
from engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from deployments.config import TracingOptions

__all__ = ["NullTracer", "Tracer", "open_tracer", "require_exporter", "spans_wanted"]

logger = logging.getLogger("ray.serve")

COMPLAINT_INTERVAL_S = 60.0
CLOSE_TIMEOUT_S = 5.0
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracer(Protocol):
    """Where the records of requests go to become spans."""

    def export(self, record: RequestRecord) -> str:
        """Make the spans of a request that has ended; returns its trace id, or nothing if it is not traced."""

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""


class NullTracer:
    """What stands here while tracing is off."""

    def export(self, record: RequestRecord) -> str:
        """Make nothing."""
        return ""

    def close(self) -> None:
        """There is nothing to close."""


def spans_wanted(options: TracingOptions, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the configuration, or else the standard's environment variables, say where spans go."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if options.otlp_endpoint is not None:
        return True
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return False
    return any(environment.get(name, "").strip() for name in ENDPOINT_VARIABLES)


def require_exporter() -> None:
    """Check that what sends spans is installed, and can speak what the environment asks for.

    Raises:
        ConfigError: that names the extra to install, or the variable.
    """
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise ConfigError(
            "tracing is configured (args.tracing.otlp_endpoint or OTEL_EXPORTER_OTLP_ENDPOINT), but its exporter is "
            "not installed; pip install -e '.[tracing]', or set OTEL_SDK_DISABLED=true"
        ) from None
    for name in PROTOCOL_VARIABLES:
        if (protocol := os.environ.get(name, "").strip()) not in ("", "http/protobuf"):
            raise ConfigError(f"{name}='{protocol}' is not offered; set it to http/protobuf (port 4318 of a collector)")


def open_tracer(options: TracingOptions, model: str) -> Tracer:
    """Return what makes spans, or what makes none if nobody has said where they go.

    Args:
        options: where to and how many.
        model: the served name.

    Raises:
        ConfigError: if the configuration asks for spans that cannot be sent. Where only the environment does, which a
            cluster may give to all of its pods, that is logged, and there are no spans.
    """
    if not spans_wanted(options):
        return NullTracer()
    try:
        require_exporter()
    except ConfigError as error:
        if options.otlp_endpoint is not None:
            raise
        logger.warning("no spans are sent: %s", error)
        return NullTracer()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint = None if options.otlp_endpoint is None else traces_url(options.otlp_endpoint)
    _log_failures_now_and_then()
    provider = _provider(options.sample_ratio)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return SpanTracer(provider, model)


def traces_url(endpoint: str) -> str:
    """Return where spans are posted: a collector's address gets the standard path, a full address stays."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _provider(sample_ratio: float | None) -> TracerProvider:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    ours = {
        "service.name": "pagoda",
        "service.version": pagoda_version(),
        "service.instance.id": uuid.uuid4().hex,
    }
    # What the operator says in OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES goes before what we say.
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    sampler = None if sample_ratio is None else ParentBased(TraceIdRatioBased(sample_ratio))
    return TracerProvider(sampler=sampler, resource=resource)


class SpanTracer:
    """Makes spans with a provider of OpenTelemetry's SDK, whose processors send them from threads of their own.

    Args:
        provider: the SDK's; it is closed with this object.
        model: the served name.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pagoda", pagoda_version())
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def export(self, record: RequestRecord) -> str:
        """Make the spans of a request that has ended."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context

        caller = self._propagator.extract(record.trace_context, context=Context())  # and nothing ambient
        root = self._tracer.start_span(
            f"{OPERATIONS[record.path]} {self._model}",
            context=caller,
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": OPERATIONS[record.path], "gen_ai.request.model": self._model},
            start_time=_wall(record, record.started),
        )
        if not root.is_recording():
            return ""
        root.set_attributes(request_attributes(record, self._model))
        if record.status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(root, Context())
        for phase in phases(record):
            span = self._tracer.start_span(
                phase.name, context=inside, attributes=phase.attributes, start_time=_wall(record, phase.start)
            )
            if phase.has_failed:
                span.set_status(Status(StatusCode.ERROR))
            span.end(_wall(record, phase.end))
        root.end(_wall(record, record.ended))
        return format_trace_id(root.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def _wall(record: RequestRecord, moment: float) -> int:
    """Return a moment of the monotonic clock in Unix nanoseconds."""
    return record.started_ns + round((moment - record.started) * 1e9)


# --- what goes wrong on the way to the collector ----------------------------------------------------------------------


class _NowAndThen(logging.Handler):
    """Passes the SDK's complaints on to our log, one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + COMPLAINT_INTERVAL_S
            logger.warning("spans could not be sent (said once a minute): %s", record.getMessage())


def _log_failures_now_and_then() -> None:
    handler = _NowAndThen()
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk"):
        theirs = logging.getLogger(name)
        if not any(isinstance(one, _NowAndThen) for one in theirs.handlers):
            theirs.addHandler(handler)
            theirs.propagate = False

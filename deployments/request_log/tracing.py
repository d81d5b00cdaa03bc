"""Tracer: OpenTelemetry spans of a request, created from its record when it has ended.

    chat pagoda-demo                      the request; a child of the caller's span if it sent a ``traceparent``
      route                               until the router chose a replica
      queue                               until the engine's first step for the request
      prefill                             until the first token
      decode                              until the last token

A request that migrated has these four phases for each attempt, one with several answers for each answer.

All spans are created in the ingress; replicas export none. An engine sends its queue, prefill and decode times as
durations, with the first and the last output. They are laid out around the arrival of the first output on the ingress's
clock, so that a child cannot start before its parent when the clocks of two hosts differ. The gap between route and
queue is the network and the step that ran when the request arrived. The durations are always sent (two small objects a
request); spans are created only when tracing is on, after the response.

The provider is our own: Ray's tracing and other global providers are neither used nor changed. The SDK is imported only
if tracing is on. Prompts and answers are never part of a span (spans.py has the attributes).
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

from deployments.proxy.paths import OPERATIONS
from deployments.request_log.record import RequestRecord
from deployments.request_log.spans import phases, request_attributes
from deployments.version import pagoda_version
from engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from deployments.config import TracingOptions

__all__ = ["NullTracer", "Tracer", "open_tracer", "require_exporter", "spans_wanted"]

logger = logging.getLogger("ray.serve")

WARNING_INTERVAL_S = 60.0
CLOSE_TIMEOUT_S = 5.0
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracer(Protocol):
    """Makes spans of requests that have ended."""

    def export(self, record: RequestRecord) -> str:
        """Make the spans of a request that has ended; returns its trace id, empty if it is not sampled."""

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""


class NullTracer:
    """The tracer while tracing is off."""

    def export(self, record: RequestRecord) -> str:
        """Make no spans."""
        return ""

    def close(self) -> None:
        """Do nothing."""


def spans_wanted(options: TracingOptions, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the configuration or OpenTelemetry's environment variables name a collector."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if options.otlp_endpoint is not None:
        return True
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return False
    return any(environment.get(name, "").strip() for name in ENDPOINT_VARIABLES)


def require_exporter() -> None:
    """Check that the exporter is installed and offers the protocol that the environment names.

    Raises:
        ConfigError: with the extra to install, or the variable to change.
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
    """Return a tracer; it makes no spans if neither the configuration nor the environment names a collector.

    Args:
        options: the collector, and the share of requests that is traced.
        model: the served name.

    Raises:
        ConfigError: if the configuration names a collector to which spans cannot be sent. If only the environment does,
            which a cluster may set for all of its pods, a warning is logged and no spans are created.
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
    _forward_sdk_warnings()
    provider = _provider(options.sample_ratio)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return SpanTracer(provider, model)


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are posted to: an address without a path gets the standard one."""
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
    # The operator's OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override ours.
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    sampler = None if sample_ratio is None else ParentBased(TraceIdRatioBased(sample_ratio))
    return TracerProvider(sampler=sampler, resource=resource)


class SpanTracer:
    """Makes spans with OpenTelemetry's SDK, whose processors send them from their own threads.

    Args:
        provider: the SDK's provider; it is shut down with this object.
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

        caller = self._propagator.extract(record.trace_context, context=Context())  # and not from the current context
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
        """Send the remaining spans, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def _wall(record: RequestRecord, moment: float) -> int:
    """Convert seconds of the monotonic clock to Unix nanoseconds."""
    return record.started_ns + round((moment - record.started) * 1e9)


# --- warnings of the SDK, such as a collector that cannot be reached --------------------------------------------------


class _RateLimitedHandler(logging.Handler):
    """Forwards the SDK's warnings to our log, at most one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + WARNING_INTERVAL_S
            logger.warning("spans could not be sent (logged at most once a minute): %s", record.getMessage())


def _forward_sdk_warnings() -> None:
    handler = _RateLimitedHandler()
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.sdk"):
        sdk_logger = logging.getLogger(name)
        if not any(isinstance(handler, _RateLimitedHandler) for handler in sdk_logger.handlers):
            sdk_logger.addHandler(handler)
            sdk_logger.propagate = False

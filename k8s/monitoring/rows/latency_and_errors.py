"""What users feel: latencies, where the time goes, and the status of answers."""

from __future__ import annotations

from k8s.monitoring.panels import BLUE, GREEN, ORANGE, RED, YELLOW, Panel, latency
from k8s.monitoring.promql import ingress, mean, rate

__all__ = ["LATENCY_AND_ERRORS"]

LATENCY_AND_ERRORS = [
    latency(
        "Time to first token",
        "time_to_first_token_seconds",
        "From a request's arrival at the engine to its first token: queue and prefill. The upper line is the alert's "
        "objective.",
        [(2.5, RED)],
    ),
    latency(
        "Inter-token latency",
        "inter_token_latency_seconds",
        "Time between two tokens of a stream. It rises with the batch size, and while prompts are prefilled beside "
        "running streams.",
    ),
    latency(
        "End-to-end latency",
        "e2e_request_latency_seconds",
        "From a request's arrival at the engine to its last token; it grows with the length of the answer.",
    ),
    Panel(
        "Where a request's time goes",
        "Mean seconds of a request in the queue, in prefill and in decode.",
        "s",
        [(part, mean(f"request_{part}_seconds")) for part in ("queue", "prefill", "decode")],
        width=12,
        stacked=True,
        colours={"queue": ORANGE, "prefill": BLUE, "decode": GREEN},
    ),
    Panel(
        "HTTP answers by status",
        "HTTP responses of the ingresses. 4xx: a client's mistake; 503: overload or no engine; 408: the request "
        "exceeded its time limit.",
        "reqps",
        [("{{status}}", rate(ingress("http_requests_total"), "status"))],
        width=12,
        stacked=True,
        colours={"200": GREEN, "400": YELLOW, "500": RED, "503": ORANGE},
    ),
]

"""Saturation: queues, refused requests and replicas."""

from __future__ import annotations

from k8s.monitoring.panels import GREEN, RED, YELLOW, Panel
from k8s.monitoring.promql import engine, ingress, rate

__all__ = ["SATURATION"]

SATURATION = [
    Panel(
        "Running",
        "Sequences in each replica's batch.",
        "none",
        [("{{replica}}", f"sum by (replica) ({engine('num_requests_running')})")],
        decimals=0,
    ),
    Panel(
        "Waiting",
        "Sequences in the waiting queue, and sequences swapped out to host memory (swapped).",
        "none",
        [
            ("{{replica}}", f"sum by (replica) ({engine('num_requests_waiting')})"),
            ("{{replica}} swapped", f"sum by (replica) ({engine('num_requests_swapped')})"),
        ],
        decimals=0,
    ),
    Panel(
        "Rejected",
        "Rejected requests: by an engine (overloaded, or the invalid parameter) and by an ingress "
        "because the queues of all engines are full. A request that an engine rejects is retried at another.",
        "reqps",
        [
            ("engine: {{reason}}", rate(engine("requests_rejected_total"), "reason")),
            ("ingress: {{reason}}", rate(ingress("ingress_rejections_total"), "reason")),
        ],
        stacked=True,
    ),
    Panel(
        "Replicas",
        "Engine replicas that accept requests, replicas that drain, and the configured minimum.",
        "none",
        [
            ("{{state}}", f"max by (state) ({ingress('replicas')})"),
            ("at least", f"max({ingress('replicas_min')})"),
        ],
        width=12,
        decimals=0,
        colours={"running": GREEN, "draining": YELLOW, "at least": RED},
    ),
    Panel(
        "Age of replicas",
        "Time since each replica became ready. A saw-tooth pattern means repeated restarts.",
        "s",
        [("{{replica}}", f"time() - max by (replica) ({engine('engine_start_time_seconds')})")],
        width=12,
    ),
]

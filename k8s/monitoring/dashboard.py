"""The Grafana dashboard: its source. It writes dashboard.json beside itself, which is what Grafana reads.

    python -m k8s.monitoring.dashboard

promql.py writes the expressions, panels.py what Grafana wants to know of a panel; here is what is shown, and where.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from k8s.monitoring.panels import (
    BLUE,
    DATASOURCE,
    GREEN,
    ORANGE,
    PURPLE,
    QUANTILE_COLOURS,
    RED,
    YELLOW,
    Json,
    Panel,
    latency,
    stat,
)
from k8s.monitoring.promql import engine, hit_ratio, imbalance, ingress, mean, quantile, rate, rate_or_zero

__all__ = ["PATH", "dashboard", "main"]

PATH = Path(__file__).with_name("dashboard.json")

COLUMNS = 24
TOKENS_PER_SECOND = "suffix: tok/s"

# ---- rows --------------------------------------------------------------------------------------------------------

RUNNING, EACH_BLOCK_ONCE = 'state="running"', 'state=~"used|cached|free"'  # shared is a part of used
IN_HAND = f"(sum by (replica) ({engine('num_requests_running')}) + sum by (replica) ({engine('num_requests_waiting')}))"

AT_A_GLANCE = [
    stat(
        "Replicas running", "Engine replicas that take requests, as the ingresses see them.", "none",
        f"max({ingress('replicas', RUNNING)})", base_colour=RED, thresholds=[(1, GREEN)], decimals=0,
    ),
    stat(
        "Time to first token, p99", "99 of 100 requests had their first token within this time.", "s",
        quantile(0.99, "time_to_first_token_seconds"), thresholds=[(1, YELLOW), (2.5, RED)],
    ),
    stat(
        "Generated tokens", "Tokens generated a second by all chosen replicas.", TOKENS_PER_SECOND,
        rate_or_zero(engine("generation_tokens_total")), base_colour=BLUE, decimals=0,
    ),
    stat(
        "Hit rate", "Share of the prompts' tokens that the prefix caches served.", "percentunit",
        hit_ratio(), base_colour=BLUE, limits=(0, 1), decimals=0,
    ),
    stat(
        "Fullest KV cache", "Share of KV blocks that running sequences hold, at the fullest replica.", "percentunit",
        f"max({engine('kv_cache_usage_ratio')})", thresholds=[(0.8, YELLOW), (0.95, RED)], limits=(0, 1), decimals=0,
    ),
    stat(
        "Waiting requests", "Sequences that wait for a place in a batch, in all chosen replicas.", "none",
        f"sum({engine('num_requests_waiting')})", thresholds=[(1, YELLOW), (64, RED)], decimals=0,
    ),
]  # fmt: skip

FELT = [
    latency(
        "Time to first token", "time_to_first_token_seconds",
        "From a request's arrival at the engine to its first token: queue and prefill. The upper line is the alert's "
        "objective.", [(2.5, RED)],
    ),
    latency(
        "Inter-token latency", "inter_token_latency_seconds",
        "Between two tokens of a stream. It rises with the batch, and when prompts are computed beside streams.",
    ),
    latency(
        "End-to-end latency", "e2e_request_latency_seconds",
        "From a request's arrival at the engine to its last token; long answers take long.",
    ),
    Panel(
        "Where a request's time goes", "Mean seconds of a request in the queue, in prefill and in decode.", "s",
        [(part, mean(f"request_{part}_seconds")) for part in ("queue", "prefill", "decode")],
        width=12, stacked=True, colours={"queue": ORANGE, "prefill": BLUE, "decode": GREEN},
    ),
    Panel(
        "HTTP answers by status", "What the ingresses answered. 4xx is the client's mistake, 503 is overload or no "
        "engine, 408 took too long.", "reqps",
        [("{{status}}", rate(ingress("http_requests_total"), "status"))],
        width=12, stacked=True, colours={"200": GREEN, "400": YELLOW, "500": RED, "503": ORANGE},
    ),
]  # fmt: skip

THROUGHPUT = [
    Panel(
        "Tokens", "Prompt tokens of requests that were started, those of them that the prefix cache served, and tokens "
        "generated.", TOKENS_PER_SECOND,
        [
            ("prompt", rate(engine("prompt_tokens_total"))),
            ("cached", rate_or_zero(engine("prefix_cache_hit_tokens_total"))),
            ("generated", rate(engine("generation_tokens_total"))),
        ],
        colours={"prompt": BLUE, "cached": GREEN, "generated": PURPLE},
    ),
    Panel(
        "Requests that ended", "By reason. stop and length are whole answers; abort: the client went away; error: "
        "there was no token to go on with.", "reqps",
        [("{{reason}}", rate(engine("requests_finished_total"), "reason"))],
        stacked=True, colours={"stop": GREEN, "length": BLUE, "abort": ORANGE, "error": RED},
    ),
    Panel(
        "Size of requests", "Tokens of prompts and of answers.", "suffix: tok",
        [
            (f"{what} p{share * 100:.0f}", quantile(share, f"request_{name}_tokens"))
            for what, name in (("prompt", "prompt"), ("answer", "generation"))
            for share in (0.5, 0.9)
        ],
    ),
    Panel(
        "Time of a step", "Mean seconds that a step of an engine takes, by phase. All sequences of the batch get a "
        "token in it.", "s",
        [
            (
                "{{phase}}",
                f"{rate(engine('step_seconds_sum'), 'phase')} / {rate(engine('step_seconds_count'), 'phase')}",
            )
        ],
        width=12, stacked=True, colours={"schedule": ORANGE, "forward": BLUE, "sample": PURPLE},
    ),
    Panel(
        "Tokens of a step", "Mean tokens that a step computes, decodes and pieces of prompts together, by replica.",
        "suffix: tok",
        [
            (
                "{{replica}}",
                f"{rate(engine('step_tokens_sum'), 'replica')} / {rate(engine('step_tokens_count'), 'replica')}",
            )
        ],
        width=12,
    ),
]  # fmt: skip

KV_CACHE = [
    Panel(
        "KV cache in use", "Share of KV blocks that running sequences hold. Near 100% sequences are preempted.",
        "percentunit", [("{{replica}}", f"max by (replica) ({engine('kv_cache_usage_ratio')})")],
        thresholds=[(0.9, YELLOW), (0.98, RED)], limits=(0, 1),
    ),
    Panel(
        "KV cache free but cached", "Share of KV blocks that are free and still hold a prefix that a prompt may find.",
        "percentunit", [("{{replica}}", f"max by (replica) ({engine('kv_cache_cached_ratio')})")], limits=(0, 1),
    ),
    Panel(
        "Prefix cache hit rate", "Share of the prompts' tokens that the prefix cache served, in all and by replica.",
        "percentunit",
        [
            ("all", hit_ratio()),
            (
                "{{replica}}",
                f"{rate(engine('prefix_cache_hit_tokens_total'), 'replica')} / "
                f"{rate(engine('prefix_cache_query_tokens_total'), 'replica')}",
            ),
        ],
        limits=(0, 1), colours={"all": BLUE},
    ),
    Panel(
        "KV blocks by state", "Blocks of all chosen replicas: used by sequences, free but cached, and free.", "none",
        [("{{state}}", f"sum by (state) ({engine('kv_blocks', EACH_BLOCK_ONCE)})")],
        stacked=True, decimals=0, colours={"used": ORANGE, "cached": GREEN, "free": BLUE},
    ),
    Panel(
        "Evictions", "Cached blocks that were overwritten a second, by replica. Where there are many, prefixes "
        "that are still wanted are lost.", "suffix: blocks/s",
        [("{{replica}}", rate(engine("blocks_evicted_total"), "replica"))],
    ),
    Panel(
        "Preemptions", "Sequences that had to give up their blocks: swapped to host memory, or computed again.", "ops",
        [("{{kind}}", rate(engine("preemptions_total"), "kind"))],
        stacked=True, colours={"swap": YELLOW, "recompute": RED},
    ),
]  # fmt: skip

ROUTING = [
    Panel(
        "Why a replica was chosen", "hit: it has the longest cached prefix; cold: nobody has any; balanced: another "
        "one has more, but is busier; fallback: by load alone; retry: the first one was lost or full.", "reqps",
        [("{{outcome}}", rate(ingress("routing_decisions_total"), "outcome"))],
        stacked=True,
        colours={"hit": GREEN, "cold": BLUE, "balanced": YELLOW, "fallback": ORANGE, "retry": RED},
    ),
    Panel(
        "Cache hits: possible, expected, real", "Prompt tokens a second that some replica was thought to have cached, "
        "that the chosen one was thought to have, and that its cache served. Expected far above real: the index is "
        "behind.", TOKENS_PER_SECOND,
        [
            ("possible", rate_or_zero(ingress("routing_best_hit_tokens_total"))),
            ("expected", rate_or_zero(ingress("routing_predicted_hit_tokens_total"))),
            ("real", rate_or_zero(engine("prefix_cache_hit_tokens_total"))),
        ],
        colours={"possible": BLUE, "expected": YELLOW, "real": GREEN},
    ),
    Panel(
        "Imbalance", "The busiest replica over the mean one, by tokens computed and by requests in hand; 1 is even. "
        "With next to no load it means nothing.", "none",
        [
            ("tokens computed", imbalance(rate(engine("step_tokens_sum"), "replica"))),
            ("requests in hand", imbalance(IN_HAND)),
        ],
        thresholds=[(2, YELLOW)], limits=(1, None), decimals=2, colours={"tokens computed": BLUE},
    ),
    Panel(
        "Index lag", "From an engine's step to when an ingress heard of it.", "s",
        [(f"p{share * 100:.0f}", quantile(share, "kv_index_lag_seconds", ingress)) for share in (0.5, 0.99)],
        thresholds=[(1, YELLOW)], colours=QUANTILE_COLOURS,
    ),
    Panel(
        "Events lost and requests moved", "Gaps in an engine's events (a snapshot is asked for), messages that were "
        "refused, and requests that went on at another replica because theirs was lost.", "ops",
        [
            ("gaps", rate_or_zero(ingress("kv_index_gaps_total"))),
            ("refused messages", rate_or_zero(ingress("kv_index_dropped_messages_total"))),
            ("migrations", rate_or_zero(ingress("request_migrations_total"))),
        ],
        colours={"gaps": ORANGE, "refused messages": RED, "migrations": PURPLE},
    ),
    Panel(
        "Time of a decision", "Seconds to rank the replicas for one request.", "s",
        [(f"p{share * 100:.0f}", quantile(share, "routing_decision_seconds", ingress)) for share in (0.5, 0.99)],
        colours=QUANTILE_COLOURS,
    ),
]  # fmt: skip

SATURATION = [
    Panel(
        "Running", "Sequences in each replica's batch.", "none",
        [("{{replica}}", f"sum by (replica) ({engine('num_requests_running')})")], decimals=0,
    ),
    Panel(
        "Waiting", "Sequences that wait for a place in the batch, and (swapped) for their blocks to come back from "
        "host memory.", "none",
        [
            ("{{replica}}", f"sum by (replica) ({engine('num_requests_waiting')})"),
            ("{{replica}} swapped", f"sum by (replica) ({engine('num_requests_swapped')})"),
        ],
        decimals=0,
    ),
    Panel(
        "Refused", "Requests refused: by an engine, by reason (overloaded, or the parameter that was wrong), and by an "
        "ingress because too much waits in all engines. One that an engine refuses is tried at another.", "reqps",
        [
            ("engine: {{reason}}", rate(engine("requests_rejected_total"), "reason")),
            ("ingress: {{reason}}", rate(ingress("ingress_rejections_total"), "reason")),
        ],
        stacked=True,
    ),
    Panel(
        "Replicas", "Engine replicas that take requests, that finish their last ones, and that there should be at "
        "least.", "none",
        [
            ("{{state}}", f"max by (state) ({ingress('replicas')})"),
            ("at least", f"max({ingress('replicas_min')})"),
        ],
        width=12, decimals=0, colours={"running": GREEN, "draining": YELLOW, "at least": RED},
    ),
    Panel(
        "Age of replicas", "Since each replica was ready. Saw teeth: replicas are restarted again and again.", "s",
        [("{{replica}}", f"time() - max by (replica) ({engine('engine_start_time_seconds')})")], width=12,
    ),
]  # fmt: skip

ROWS = {
    "What users feel": FELT,
    "Throughput": THROUGHPUT,
    "KV cache": KV_CACHE,
    "Routing": ROUTING,
    "Saturation": SATURATION,
}


# ---- the whole ---------------------------------------------------------------------------------------------------


def place(panels: Iterable[Panel], y: int, first_number: int) -> tuple[list[Json], int]:
    """Put panels side by side, line after line; return them and where the next line begins."""
    placed, x, height = [], 0, 0
    for number, panel in enumerate(panels, start=first_number):
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        placed.append(panel.json(number, x, y))
        x, height = x + panel.width, max(height, panel.height)
    return placed, y + height


def all_panels() -> list[Json]:
    """Return the panels and the rows above them, from top to bottom."""
    panels, y = place(AT_A_GLANCE, 0, 1)
    for title, row in ROWS.items():
        number = len(panels) + 1
        grid = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        placed, y = place(row, y + 1, number + 1)
        panels += placed
    return panels


def query_variable(name: str, label: str, query: str, **options: object) -> Json:
    """Return a variable whose values are those of a label."""
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "regex": "",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "options": [], **options,
    }  # fmt: skip


def variables() -> list[Json]:
    """Return what can be chosen above the panels."""
    prefixes = {"Ray's agent": "ray_pagoda", "GET /metrics": "pagoda"}
    first = next(iter(prefixes.items()))
    of_model = '{namespace=~"$namespace", model=~"$model"}'
    return [
        {
            "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
            "regex": "", "multi": False, "includeAll": False, "current": {}, "options": [],
        },
        {
            "name": "prefix", "label": "Scraped from", "type": "custom", "multi": False, "includeAll": False,
            "query": ", ".join(f"{text} : {value}" for text, value in prefixes.items()),
            "current": {"selected": True, "text": first[0], "value": first[1]},
            "options": [
                {"selected": value == first[1], "text": text, "value": value} for text, value in prefixes.items()
            ],
        },
        query_variable(
            "namespace", "Namespace", "label_values(${prefix}_engine_info, namespace)", allValue=".*",
        ),
        query_variable(
            "model", "Model", 'label_values(${prefix}_engine_info{namespace=~"$namespace"}, model)', allValue=".*",
        ),
        query_variable("replica", "Replica", f"label_values(${{prefix}}_engine_info{of_model}, replica)"),
        query_variable("ingress", "Ingress", f"label_values(${{prefix}}_ingress_info{of_model}, ingress)", hide=2),
    ]  # fmt: skip


def marks() -> list[Json]:
    """Return what is marked in every panel: that a replica is ready."""
    return [
        {
            "name": "Annotations & Alerts", "type": "dashboard", "builtIn": 1, "enable": True, "hide": True,
            "iconColor": BLUE, "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        },
        {
            "name": "Replica started", "enable": True, "iconColor": GREEN, "datasource": DATASOURCE,
            "expr": f"max by (replica) ({engine('engine_start_time_seconds')}) * 1000",
            "titleFormat": "{{replica}} is ready", "useValueForTime": "on", "step": "60s",
        },
    ]  # fmt: skip


def dashboard() -> Json:
    """Return the dashboard's model."""
    return {
        "uid": "pagoda",
        "title": "Pagoda",
        "description": "LLM serving: what users feel, throughput, KV cache, routing and saturation.",
        "tags": ["pagoda", "llm", "ray"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cross hair through all panels
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables()},
        "annotations": {"list": marks()},
        "links": [
            {
                "title": "Ray's dashboards", "type": "dashboards", "tags": ["ray"], "asDropdown": True, "icon": "apps",
                "includeVars": False, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
            }
        ],
        "panels": all_panels(),
    }  # fmt: skip


def main() -> None:
    """Write dashboard.json."""
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n")


if __name__ == "__main__":
    main()

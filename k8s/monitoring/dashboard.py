"""The source of the Grafana dashboard; running it writes dashboard.json, the file that Grafana reads.

    python -m k8s.monitoring.dashboard

rows/ holds the panels, promql.py writes their expressions and panels.py their JSON. This module arranges the rows and
adds the variables and annotations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from k8s.monitoring.panels import BLUE, DATASOURCE, GREEN, Json, Panel
from k8s.monitoring.promql import engine
from k8s.monitoring.rows.at_a_glance import AT_A_GLANCE
from k8s.monitoring.rows.kv_cache import KV_CACHE
from k8s.monitoring.rows.kv_tiers import KV_TIERS
from k8s.monitoring.rows.latency_and_errors import LATENCY_AND_ERRORS
from k8s.monitoring.rows.routing import ROUTING
from k8s.monitoring.rows.saturation import SATURATION
from k8s.monitoring.rows.speculation import SPECULATION
from k8s.monitoring.rows.throughput import THROUGHPUT

__all__ = ["PATH", "as_text", "dashboard", "main"]

PATH = Path(__file__).with_name("dashboard.json")

COLUMNS = 24
ROWS = {
    "What users feel": LATENCY_AND_ERRORS,
    "Throughput": THROUGHPUT,
    "Speculative decoding": SPECULATION,
    "KV cache": KV_CACHE,
    "KV tiers": KV_TIERS,
    "Routing": ROUTING,
    "Saturation": SATURATION,
}


def arrange(panels: Iterable[Panel], y: int, first_number: int) -> tuple[list[Json], int]:
    """Lay panels out from left to right, line by line; return their JSON and the y of the next line."""
    arranged, x, height = [], 0, 0
    for number, panel in enumerate(panels, start=first_number):
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        arranged.append(panel.json(number, x, y))
        x, height = x + panel.width, max(height, panel.height)
    return arranged, y + height


def all_panels() -> list[Json]:
    """Return all panels with the headings of their rows, from top to bottom."""
    panels, y = arrange(AT_A_GLANCE, 0, 1)
    for title, row in ROWS.items():
        number = len(panels) + 1
        grid = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        arranged, y = arrange(row, y + 1, number + 1)
        panels += arranged
    return panels


def query_variable(name: str, label: str, query: str, **options: object) -> Json:
    """Return a variable whose choices are the values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "regex": "",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        **options,
    }


def variables() -> list[Json]:
    """Return the variables that a reader sets above the panels."""
    prefixes = {"Ray's agent": "ray_pagoda", "GET /metrics": "pagoda"}
    first = next(iter(prefixes.items()))
    of_model = '{namespace=~"$namespace", model=~"$model"}'
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "regex": "",
            "multi": False,
            "includeAll": False,
            "current": {},
            "options": [],
        },
        {
            "name": "prefix",
            "label": "Scraped from",
            "type": "custom",
            "multi": False,
            "includeAll": False,
            "query": ", ".join(f"{text} : {value}" for text, value in prefixes.items()),
            "current": {"selected": True, "text": first[0], "value": first[1]},
            "options": [
                {"selected": value == first[1], "text": text, "value": value} for text, value in prefixes.items()
            ],
        },
        query_variable(
            "namespace",
            "Namespace",
            "label_values(${prefix}_engine_info, namespace)",
            allValue=".*",
        ),
        query_variable(
            "model",
            "Model",
            'label_values(${prefix}_engine_info{namespace=~"$namespace"}, model)',
            allValue=".*",
        ),
        query_variable("replica", "Replica", f"label_values(${{prefix}}_engine_info{of_model}, replica)"),
        query_variable("ingress", "Ingress", f"label_values(${{prefix}}_ingress_info{of_model}, ingress)", hide=2),
    ]


def event_annotations() -> list[Json]:
    """Return the annotations of every panel: a mark where a replica becomes ready."""
    return [
        {
            "name": "Annotations & Alerts",
            "type": "dashboard",
            "builtIn": 1,
            "enable": True,
            "hide": True,
            "iconColor": BLUE,
            "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        },
        {
            "name": "Replica started",
            "enable": True,
            "iconColor": GREEN,
            "datasource": DATASOURCE,
            "expr": f"max by (replica) ({engine('engine_start_time_seconds')}) * 1000",
            "titleFormat": "{{replica}} is ready",
            "useValueForTime": "on",
            "step": "60s",
        },
    ]


def dashboard() -> Json:
    """Return the dashboard as Grafana's JSON model."""
    return {
        "uid": "pagoda",
        "title": "Pagoda",
        "description": "LLM serving: what users feel, throughput, KV cache, routing and saturation.",
        "tags": ["pagoda", "llm", "ray"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair through all panels
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables()},
        "annotations": {"list": event_annotations()},
        "links": [
            {
                "title": "Ray's dashboards",
                "type": "dashboards",
                "tags": ["ray"],
                "asDropdown": True,
                "icon": "apps",
                "includeVars": False,
                "keepTime": True,
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
        "panels": all_panels(),
    }


def as_text(document: Json) -> str:
    """Return the dashboard as JSON with a line for each panel and for each of the other members."""
    others = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in document.items() if name != "panels"]
    panels = ",\n".join(f"  {json.dumps(panel)}" for panel in document["panels"])
    return "{\n" + ",\n".join([*others, f' "panels": [\n{panels}\n ]']) + "\n}\n"


def main() -> None:
    """Write dashboard.json."""
    PATH.write_text(as_text(dashboard()), encoding="utf-8")


if __name__ == "__main__":
    main()

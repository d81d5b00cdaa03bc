"""The queries of the dashboard and the alerts, read from the shipped files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "k8s" / "monitoring"
PREFIXES = ("pagoda", "ray_pagoda")

Json = dict[str, Any]


def dashboard() -> Json:
    """Return the dashboard as Grafana gets it."""
    loaded: Json = json.loads((FOLDER / "dashboard.json").read_text())
    return loaded


def panels() -> list[Json]:
    """Return the panels, without the rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Yield a name and an expression for each query of the dashboard, with its variables unreplaced."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]
    for mark in dashboard()["annotations"]["list"]:
        if "expr" in mark:
            yield mark["name"], mark["expr"]


def label_queries() -> Iterator[tuple[str, str, str]]:
    """Yield a variable's name, its series, and the label whose values are its choices."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert match, variable["query"]
            yield variable["name"], match[1], match[2]


def rules() -> list[Json]:
    """Return the alerts."""
    spec = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text())["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def write_rules(path: Path, prefix: str = "ray_pagoda", **changes: Any) -> Path:
    """Write the alerts in Prometheus' own format, for one of the endpoints, with ``changes`` made to each rule."""
    expressions = [rule["expr"].replace("ray_pagoda_", f"{prefix}_") for rule in rules()]
    changed = [rule | {"expr": expr} | changes for rule, expr in zip(rules(), expressions, strict=True)]
    for rule in changed:
        rule["labels"] = rule["labels"] | {"endpoint": prefix}
    path.write_text(yaml.safe_dump({"groups": [{"name": prefix, "rules": changed}]}))
    return path

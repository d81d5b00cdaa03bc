"""Writes the table of metrics in README.md from the definitions of the metrics.

python -m k8s.monitoring.metrics_table
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from deployments.observability.ingress_metrics import INGRESS_METRICS
from engine.observability.metrics import METRICS, Metric

__all__ = ["README", "main", "with_table"]

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"
SUFFIXES = {"counter": "_total", "gauge": "", "histogram": ""}


def with_table(text: str) -> str:
    """Return ``text`` with the current table between the two markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


def table() -> str:
    """Return the tables of the engine's metrics and of the ingress's metrics."""
    return f"\n{_rows('engine, label `replica`', METRICS)}\n{_rows('ingress, label `ingress`', INGRESS_METRICS)}\n"


def _rows(title: str, metrics: Iterable[Metric]) -> str:
    lines = [f"| {title} | kind | labels | |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{name}`" for name in metric.labels)
        lines.append(f"| `{metric.name}{SUFFIXES[metric.kind]}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write README.md."""
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

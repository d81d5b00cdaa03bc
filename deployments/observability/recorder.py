"""Recorder: keeps the current value of every metric of one process.

Engine and ingress report to it as a MetricSink. prometheus.py and ray_exporter.py read its snapshots; what a metric
means is defined in engine/observability/metrics.py and ingress_metrics.py.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.observability.metrics import Metric

__all__ = ["Recorder", "Series"]


@dataclass(frozen=True, slots=True)
class Series:
    """The value of one metric for one set of label values at one moment. It pickles."""

    metric: Metric
    labels: tuple[str, ...]
    value: float  # of a histogram: the sum of the observed values
    counts: tuple[int, ...] = ()  # of a histogram: per bucket, the last one unbounded


class _Cell:
    """The running value of one series."""

    __slots__ = ("counts", "labels", "metric", "value")

    def __init__(self, metric: Metric, labels: tuple[str, ...]) -> None:
        self.metric = metric
        self.labels = labels
        self.value = 0.0
        self.counts = [0] * (len(metric.buckets) + 1) if metric.kind == "histogram" else []


class Recorder:
    """A MetricSink that keeps every value in memory. Every method may be called from any thread.

    Args:
        metrics: the counters and histograms among these start with the value 0 for each known label value, because
            Prometheus counts a first event only as the increase from a value that it has scraped.
    """

    def __init__(self, metrics: Iterable[Metric] = ()) -> None:
        self._cells: dict[tuple[str, ...], _Cell] = {}
        self._lock = threading.Lock()
        for metric in metrics:
            for values in () if metric.kind == "gauge" else metric.known if metric.labels else ((),):
                self._cell(metric, dict(zip(metric.labels, values, strict=True)))

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add a positive amount to a counter."""
        with self._lock:
            self._cell(metric, labels).value += amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._cell(metric, labels).value = value

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        """Record a value in a histogram, ``count`` times."""
        with self._lock:
            cell = self._cell(metric, labels)
            cell.value += value * count
            cell.counts[bisect_left(metric.buckets, value)] += count

    def snapshot(self) -> list[Series]:
        """Return the value of every series."""
        with self._lock:
            return [Series(cell.metric, cell.labels, cell.value, tuple(cell.counts)) for cell in self._cells.values()]

    def _cell(self, metric: Metric, labels: Mapping[str, str]) -> _Cell:
        values = tuple([labels[name] for name in metric.labels]) if metric.labels else ()
        key = (metric.name, *values)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(metric, values)
        return cell

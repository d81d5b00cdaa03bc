"""Telemetry: keeps every metric's value in this process and writes them for ``GET /metrics``.

``Recorder`` is the sink that engine and ingress report to; ``render`` writes the recorders of all replicas as
Prometheus text. The other door, Ray's metrics agent, is ray_exporter.py. Metrics of the engine are defined in
engine/observability/metrics.py, those of the ingress here.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from engine.observability.metrics import Metric

__all__ = [
    "HTTP_REQUESTS",
    "INGRESS_INFO",
    "INGRESS_METRICS",
    "INGRESS_REJECTIONS",
    "KV_INDEX_BLOCKS",
    "KV_INDEX_DROPPED",
    "KV_INDEX_GAPS",
    "KV_INDEX_LAG",
    "REPLICAS",
    "REPLICAS_MIN",
    "REQUEST_MIGRATIONS",
    "ROUTING_BEST_HIT_TOKENS",
    "ROUTING_DECISIONS",
    "ROUTING_DECISION_SECONDS",
    "ROUTING_PREDICTED_HIT_TOKENS",
    "Recorder",
    "Series",
    "cumulative",
    "ingress_recorder",
    "render",
]

LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)

HTTP_REQUESTS = Metric("http_requests", "counter", "HTTP requests answered.", ("path", "status"))
INGRESS_INFO = Metric("ingress_info", "gauge", "Always 1; the labels describe the ingress.", ("model",))
ROUTING_DECISIONS = Metric(
    "routing_decisions",
    "counter",
    "Choices of a replica for a request, by why it came first.",
    ("outcome",),
    known=(("hit",), ("cold",), ("balanced",), ("fallback",), ("retry",)),
)
ROUTING_DECISION_SECONDS = Metric(
    "routing_decision_seconds", "histogram", "Time to rank the replicas for one request.", (), DECISION_BUCKETS
)
ROUTING_PREDICTED_HIT_TOKENS = Metric(
    "routing_predicted_hit_tokens", "counter", "Prompt tokens that the chosen replicas were thought to have cached."
)
ROUTING_BEST_HIT_TOKENS = Metric(
    "routing_best_hit_tokens", "counter", "Prompt tokens that some replica was thought to have cached."
)
INGRESS_REJECTIONS = Metric(
    "ingress_rejections",
    "counter",
    "Requests refused before an engine saw them.",
    ("reason",),
    known=(("overloaded",),),
)
KV_INDEX_BLOCKS = Metric("kv_index_blocks", "gauge", "KV blocks that this ingress knows of.")
KV_INDEX_LAG = Metric(
    "kv_index_lag_seconds", "histogram", "From an engine's step to when this ingress heard of it.", (), LAG_BUCKETS
)
KV_INDEX_GAPS = Metric("kv_index_gaps", "counter", "Times that KV events were missing and a snapshot was asked for.")
KV_INDEX_DROPPED = Metric(
    "kv_index_dropped_messages",
    "counter",
    "Messages and endpoints that were refused.",
    ("reason",),
    known=(("malformed",), ("oversized",)),
)
REQUEST_MIGRATIONS = Metric("request_migrations", "counter", "Requests sent to another replica after theirs was lost.")
REPLICAS = Metric("replicas", "gauge", "Engine replicas that this ingress knows of.", ("state",))
REPLICAS_MIN = Metric("replicas_min", "gauge", "Engine replicas that there are at least when all is well.")

INGRESS_METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class Series:
    """One metric's value for one set of labels at one moment; pickles small."""

    metric: Metric
    labels: tuple[str, ...]
    value: float  # of a histogram: the sum of what was observed
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
    """A MetricSink that remembers; every method may be called from any thread.

    Args:
        metrics: counters and histograms among these have a value, 0, from the start, for each label value that is known
            beforehand: Prometheus sees a first event only as a rise from a value that it has seen.
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


@cache
def ingress_recorder() -> Recorder:
    """Return the recorder of this ingress process; the router, which Serve makes, reports to it too."""
    return Recorder(INGRESS_METRICS)


# ---- GET /metrics -----------------------------------------------------------------------------------------------


Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Families(Collector):
    """Series of several processes as Prometheus metric families."""

    def __init__(self, sources: Iterable[tuple[str, str, Iterable[Series]]]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Family]:
        """Yield one family a metric, the series of all processes in it."""
        families: dict[str, Family] = {}
        for label, process, several in self._sources:
            for series in several:
                name = f"pagoda_{series.metric.name}"
                if name not in families:
                    families[name] = _new_family(name, series.metric, label)
                _add(families[name], series, process)
        return families.values()


def _new_family(name: str, metric: Metric, label: str) -> Family:
    labels = [label, *metric.labels]
    if metric.kind == "counter":
        return CounterMetricFamily(name, metric.help, labels=labels)
    if metric.kind == "gauge":
        return GaugeMetricFamily(name, metric.help, labels=labels)
    return HistogramMetricFamily(name, metric.help, labels=labels)


def _add(family: Family, series: Series, process: str) -> None:
    labels = [process, *series.labels]
    if not isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, series.value)
        return
    family.add_metric(labels, buckets=cumulative(series), sum_value=series.value)


def cumulative(series: Series) -> list[tuple[str, float]]:
    """Return a histogram's buckets as Prometheus has them: each bound, and how many values do not exceed it."""
    bounds = [*(str(float(bound)) for bound in series.metric.buckets), "+Inf"]
    return list(zip(bounds, map(float, accumulate(series.counts)), strict=True))


def render(engines: Mapping[str, Iterable[Series]], ingresses: Mapping[str, Iterable[Series]]) -> bytes:
    """Return the Prometheus text of engine replicas (label ``replica``) and of ingresses (label ``ingress``)."""
    sources = [("replica", name, series) for name, series in sorted(engines.items())]
    sources += [("ingress", name, series) for name, series in sorted(ingresses.items())]
    return generate_latest(_Families(sources))

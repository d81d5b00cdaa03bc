"""Telemetry: keeps every metric's value in this process and gives them to two doors.

``Recorder`` is the sink that engine and ingress report to; ``render`` writes the recorders of all replicas as
Prometheus text for ``GET /metrics``; ``RayExporter`` carries one recorder's values to Ray's metrics agent, from a
thread of its own, because Ray's calls are too slow for the engine's loop. Metrics of the engine are defined in
engine/metrics.py, those of the ingress here.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from ray.serve import metrics as ray_metrics

from engine.metrics import Metric

__all__ = [
    "HTTP_REQUESTS",
    "INGRESS_METRICS",
    "INGRESS_REJECTIONS",
    "KV_INDEX_BLOCKS",
    "KV_INDEX_DROPPED",
    "KV_INDEX_GAPS",
    "KV_INDEX_LAG",
    "REPLICAS",
    "REQUEST_MIGRATIONS",
    "ROUTING_BEST_HIT_TOKENS",
    "ROUTING_DECISIONS",
    "ROUTING_DECISION_SECONDS",
    "ROUTING_PREDICTED_HIT_TOKENS",
    "RayExporter",
    "Recorder",
    "Series",
    "ingress_recorder",
    "render",
]

logger = logging.getLogger("ray.serve")

LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DECISION_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0)

HTTP_REQUESTS = Metric("http_requests", "counter", "HTTP requests answered.", ("path", "status"))
ROUTING_DECISIONS = Metric("routing_decisions", "counter", "Requests by why their replica was chosen.", ("outcome",))
ROUTING_DECISION_SECONDS = Metric(
    "routing_decision_seconds", "histogram", "Time to rank the replicas for one request.", (), DECISION_BUCKETS
)
ROUTING_PREDICTED_HIT_TOKENS = Metric(
    "routing_predicted_hit_tokens", "counter", "Prompt tokens that the chosen replicas were thought to have cached."
)
ROUTING_BEST_HIT_TOKENS = Metric(
    "routing_best_hit_tokens", "counter", "Prompt tokens that some replica was thought to have cached."
)
INGRESS_REJECTIONS = Metric("ingress_rejections", "counter", "Requests refused before an engine saw them.", ("reason",))
KV_INDEX_BLOCKS = Metric("kv_index_blocks", "gauge", "KV blocks that this ingress knows of.")
KV_INDEX_LAG = Metric(
    "kv_index_lag_seconds", "histogram", "From an engine's step to when this ingress heard of it.", (), LAG_BUCKETS
)
KV_INDEX_GAPS = Metric("kv_index_gaps", "counter", "Times that KV events were missing and a snapshot was asked for.")
KV_INDEX_DROPPED = Metric(
    "kv_index_dropped_messages", "counter", "Messages and endpoints that were refused.", ("reason",)
)
REQUEST_MIGRATIONS = Metric("request_migrations", "counter", "Requests sent to another replica after theirs was lost.")
REPLICAS = Metric("replicas", "gauge", "Engine replicas that this ingress knows of.", ("state",))

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
    """A MetricSink that remembers; every method may be called from any thread."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, ...], _Cell] = {}
        self._lock = threading.Lock()

    def increment(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add a positive amount to a counter."""
        with self._lock:
            self._cell(metric, labels).value += amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._cell(metric, labels).value = value

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Record one value in a histogram."""
        with self._lock:
            cell = self._cell(metric, labels)
            cell.value += value
            cell.counts[bisect_left(metric.buckets, value)] += 1

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
    return Recorder()


# ---- door 1: GET /metrics ---------------------------------------------------------------------------------------


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
    bounds = [*(str(float(bound)) for bound in series.metric.buckets), "+Inf"]
    cumulative: list[tuple[str, float]] = []
    for bound, count in zip(bounds, series.counts, strict=True):
        cumulative.append((bound, count + (cumulative[-1][1] if cumulative else 0)))
    family.add_metric(labels, buckets=cumulative, sum_value=series.value)


def render(engines: Mapping[str, Iterable[Series]], ingresses: Mapping[str, Iterable[Series]]) -> bytes:
    """Return the Prometheus text of engine replicas (label ``replica``) and of ingresses (label ``ingress``)."""
    sources = [("replica", name, series) for name, series in sorted(engines.items())]
    sources += [("ingress", name, series) for name, series in sorted(ingresses.items())]
    return generate_latest(_Families(sources))


# ---- door 2: Ray's metrics agent ----------------------------------------------------------------------------------


class RayExporter:
    """Carries a recorder's values to Ray's metrics agent every few seconds, as ``ray_pagoda_<name>``."""

    def __init__(self, recorder: Recorder, period_s: float = 5.0) -> None:
        self._recorder = recorder
        self._period_s = period_s
        self._sent: dict[tuple[str, ...], Series] = {}
        self._failed: set[str] = set()  # metrics whose failure is in the log
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def stop(self) -> None:
        """Export what is left and end the thread."""
        self._stopped.set()
        self._thread.join(timeout=self._period_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Send what changed since the last call."""
        for series in self._recorder.snapshot():
            key = (series.metric.name, *series.labels)
            previous = self._sent.get(key)
            if series != previous and self._try_to_send(series, previous):
                self._sent[key] = series

    def _try_to_send(self, series: Series, previous: Series | None) -> bool:
        """Send one series; what goes wrong is logged once a metric, and the others, and later values, go on."""
        try:
            _send(series, previous)
        except Exception:
            if series.metric.name not in self._failed:
                self._failed.add(series.metric.name)
                logger.exception("metric %s could not be sent to Ray's agent", series.metric.name)
            return False
        return True


@cache
def _ray_metric(metric: Metric) -> ray_metrics.Counter | ray_metrics.Gauge | ray_metrics.Histogram:
    name = f"pagoda_{metric.name}"
    tags: Any = metric.labels  # Ray's annotation allows a tuple of one only
    if metric.kind == "counter":
        return ray_metrics.Counter(name, description=metric.help, tag_keys=tags)
    if metric.kind == "gauge":
        return ray_metrics.Gauge(name, description=metric.help, tag_keys=tags)
    return ray_metrics.Histogram(name, description=metric.help, boundaries=list(metric.buckets), tag_keys=tags)


def _send(series: Series, previous: Series | None) -> None:
    """Send one series to Ray; counters and histograms as the difference to what was sent before."""
    target = _ray_metric(series.metric)
    tags = dict(zip(series.metric.labels, series.labels, strict=True))
    if isinstance(target, ray_metrics.Gauge):
        target.set(series.value, tags=tags)
    elif isinstance(target, ray_metrics.Counter):
        target.inc(series.value - (previous.value if previous else 0.0), tags=tags)
    else:
        _observe_difference(target, series, previous, tags)


def _observe_difference(
    target: ray_metrics.Histogram, series: Series, previous: Series | None, tags: dict[str, str]
) -> None:
    """Observe, bucket by bucket, a value that falls into it: Ray has no call that takes counts."""
    before = previous.counts if previous else (0,) * len(series.counts)
    new = [now - then for now, then in zip(series.counts, before, strict=True)]
    total = series.value - (previous.value if previous else 0.0)
    for value, count in zip(_representatives(series.metric.buckets, new, total), new, strict=True):
        for _ in range(count):
            target.observe(value, tags=tags)


def _representatives(buckets: tuple[float, ...], counts: list[int], total: float) -> list[float]:
    """Return one value inside each bucket, chosen so that the sum comes near ``total``."""
    lows = [buckets[0] / 2, *buckets]
    highs = [*buckets, buckets[-1] * 2]
    low_sum = sum(low * count for low, count in zip(lows, counts, strict=True))
    high_sum = sum(high * count for high, count in zip(highs, counts, strict=True))
    # The share is not 0, as a bucket does not hold its lower bound.
    share = 0.5 if high_sum <= low_sum else min(max((total - low_sum) / (high_sum - low_sum), 1e-6), 1.0)
    return [low + share * (high - low) for low, high in zip(lows, highs, strict=True)]

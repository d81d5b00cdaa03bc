"""Prometheus text of recorded metrics: what ``GET /metrics`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from deployments.observability.recorder import Series
from engine.observability.metrics import Metric

__all__ = ["cumulative", "render"]

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Families(Collector):
    """The series of several processes as Prometheus metric families."""

    def __init__(self, sources: Iterable[tuple[str, str, Iterable[Series]]]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Family]:
        """Return one family per metric with the series of all processes."""
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
    """Return a histogram's cumulative buckets: (upper bound, number of values up to it)."""
    bounds = [*(str(float(bound)) for bound in series.metric.buckets), "+Inf"]
    return list(zip(bounds, map(float, accumulate(series.counts)), strict=True))


def render(engines: Mapping[str, Iterable[Series]], ingresses: Mapping[str, Iterable[Series]]) -> bytes:
    """Return the Prometheus text of engine replicas (label ``replica``) and of ingresses (label ``ingress``)."""
    sources = [("replica", name, series) for name, series in sorted(engines.items())]
    sources += [("ingress", name, series) for name, series in sorted(ingresses.items())]
    return generate_latest(_Families(sources))

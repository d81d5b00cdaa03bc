"""RayExporter: carries one recorder's values to Ray's metrics agent, which shows them as ``ray_pagoda_<name>``.

It has a thread of its own, because Ray's calls are too slow for the engine's loop. Names and labels are those of
``GET /metrics``, so that one dashboard serves both; Ray adds ``deployment``, ``application`` and more.

The agent forgets a gauge that it has not been told again for two of its reporting intervals (of 10 s each), so that
what a dead process has said goes; those of a living one are told every time.

Ray's own Histogram takes one call a value, and its agent one more, and then knows the buckets but not the sum, which it
makes up from their middles. So a histogram goes as what Prometheus makes of it anyway, the series ``_bucket``, ``_sum``
and ``_count``, each a gauge for Ray; PromQL reads them alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from ray import serve
from ray.serve import metrics as ray_metrics

from deployments.observability.prometheus import cumulative
from deployments.observability.recorder import Recorder, Series
from engine.observability.metrics import Metric

__all__ = ["RayExporter"]

logger = logging.getLogger("ray.serve")


class RayExporter:
    """Carries a recorder's values to Ray's metrics agent every few seconds.

    Args:
        recorder: where the values are.
        label: what ``GET /metrics`` calls a process of this kind. Ray itself adds ``replica``.
        refresh: called before values are read, by the exporter's thread.
    """

    def __init__(
        self,
        recorder: Recorder,
        label: Literal["replica", "ingress"] = "replica",
        refresh: Callable[[], None] = lambda: None,
        period_s: float = 5.0,
    ) -> None:
        self._recorder = recorder
        self._label = label
        self._refresh = refresh
        self._period_s = period_s
        self._tags: dict[str, str] = {}
        self._sent: dict[tuple[str, ...], Series] = {}
        self._failed: set[str] = set()  # metrics whose failure is in the log; "": bringing them up to date
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)

    def start(self) -> None:
        """Begin to export; inside a Serve replica, whose name is told."""
        if self._label != "replica":
            self._tags = {self._label: serve.get_replica_context().replica_id.unique_id}
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
        """Send what there is."""
        try:
            self._refresh()
        except Exception:
            if "" not in self._failed:
                self._failed.add("")
                logger.exception("what is told to Ray's agent is not up to date")
        for series in self._recorder.snapshot():
            key = (series.metric.name, *series.labels)
            if self._try_to_send(series, self._sent.get(key)):
                self._sent[key] = series

    def _try_to_send(self, series: Series, previous: Series | None) -> bool:
        """Send one series; what goes wrong is logged once a metric, and the others, and later values, go on."""
        try:
            _send(series, previous, self._tags)
        except Exception:
            if series.metric.name not in self._failed:
                self._failed.add(series.metric.name)
                logger.exception("metric %s could not be sent to Ray's agent", series.metric.name)
            return False
        return True


def _send(series: Series, previous: Series | None, process: Mapping[str, str]) -> None:
    """Send one series to Ray; a counter as the difference to what was sent before, which Ray wants to be above 0."""
    metric, tags = series.metric, {**process, **dict(zip(series.metric.labels, series.labels, strict=True))}
    keys = tuple(tags)
    if metric.kind == "gauge":
        _gauge(metric, "", keys).set(series.value, tags=tags)
    elif metric.kind == "histogram":
        _gauge(metric, "_sum", keys).set(series.value, tags=tags)
        _gauge(metric, "_count", keys).set(sum(series.counts), tags=tags)
        for bound, count in cumulative(series):
            _gauge(metric, "_bucket", (*keys, "le")).set(count, tags={**tags, "le": bound})
    elif difference := series.value - (previous.value if previous else 0.0):
        _counter(metric, keys).inc(difference, tags=tags)


@cache
def _counter(metric: Metric, keys: Any) -> ray_metrics.Counter:  # Ray's annotation of keys allows a tuple of one only
    return ray_metrics.Counter(f"pagoda_{metric.name}", description=metric.help, tag_keys=keys)


@cache
def _gauge(metric: Metric, suffix: str, keys: Any) -> ray_metrics.Gauge:
    return ray_metrics.Gauge(f"pagoda_{metric.name}{suffix}", description=metric.help, tag_keys=keys)

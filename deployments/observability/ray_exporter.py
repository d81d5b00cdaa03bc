"""RayExporter: sends one recorder's values to Ray's metrics agent, which serves them as ``ray_pagoda_<name>``.

It runs in its own thread, because Ray's calls are too slow for the engine's loop. Names and labels are those of
``GET /metrics``, so that one dashboard works with both; Ray adds ``deployment``, ``application`` and more.

The agent drops a gauge that is not repeated within two of its reporting intervals (of 10 s each), so the values of a
dead process disappear. For that reason all gauges are sent every time.

Ray's own Histogram takes one call per value and estimates the sum from the middles of the buckets. So a histogram is
sent as the series that Prometheus derives from it, ``_bucket``, ``_sum`` and ``_count``, each a gauge for Ray; PromQL
reads them the same way.
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
    """Sends a recorder's values to Ray's metrics agent every few seconds.

    Args:
        recorder: the source of the values.
        label: the label that ``GET /metrics`` gives a process of this kind. Ray itself adds ``replica``.
        refresh: called by the exporter's thread before it reads the values.
        period_s: seconds between two exports.
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
        self._failed: set[str] = set()  # metrics whose failure was logged; "" stands for refresh
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it inside a Serve replica: an ingress is labelled with the replica's name."""
        if self._label != "replica":
            self._tags = {self._label: serve.get_replica_context().replica_id.unique_id}
        self._thread.start()

    def stop(self) -> None:
        """Export the last values and end the thread."""
        self._stopped.set()
        self._thread.join(timeout=self._period_s)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.flush()
        self.flush()

    def flush(self) -> None:
        """Send all values once."""
        try:
            self._refresh()
        except Exception:
            if "" not in self._failed:
                self._failed.add("")
                logger.exception("metrics could not be refreshed before their export to Ray's agent")
        for series in self._recorder.snapshot():
            key = (series.metric.name, *series.labels)
            if self._try_to_send(series, self._sent.get(key)):
                self._sent[key] = series

    def _try_to_send(self, series: Series, previous: Series | None) -> bool:
        """Send one series; return False and log once per metric if that fails."""
        try:
            _send(series, previous, self._tags)
        except Exception:
            if series.metric.name not in self._failed:
                self._failed.add(series.metric.name)
                logger.exception("metric %s could not be sent to Ray's agent", series.metric.name)
            return False
        return True


def _send(series: Series, previous: Series | None, process: Mapping[str, str]) -> None:
    """Send one series to Ray; a counter as its increase since the last export, which Ray requires to be positive."""
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

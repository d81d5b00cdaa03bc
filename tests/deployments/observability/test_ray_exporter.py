"""RayExporter with fakes of Ray's metric types."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    from deployments.observability import ray_exporter
    from deployments.observability.ray_exporter import RayExporter

from deployments.observability.recorder import Recorder, Series
from engine.observability.metrics import Metric
from tests.waiting import until

COUNTER = Metric("things", "counter", "Things.", ("kind",), known=(("x",), ("y",)))
GAUGE = Metric("level", "gauge", "Level.")
HISTOGRAM = Metric("seconds", "histogram", "Seconds.", (), (0.1, 1.0))


class Agent:
    """Keeps the last values, as Ray's agent does."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def metric(self, name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        agent = self

        class Fake:
            def key(self, tags: dict[str, str]) -> str:
                assert set(tags) == set(tag_keys)
                return name + "".join(f" {key}={value}" for key, value in sorted(tags.items()))

            def set(self, value: float, tags: dict[str, str]) -> None:
                agent.values[self.key(tags)] = value

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0  # or Ray raises
                agent.values[self.key(tags)] = agent.values.get(self.key(tags), 0) + value

        return Fake()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = Agent()
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(ray_exporter.ray_metrics, kind, agent.metric)
    for cached in (ray_exporter._counter, ray_exporter._gauge):
        cached.cache_clear()
    return agent


def test_the_agent_shows_what_get_metrics_shows(agent: Agent) -> None:
    recorder = Recorder([COUNTER, HISTOGRAM])
    exporter = RayExporter(recorder)
    exporter.flush()
    assert agent.values == {
        "pagoda_seconds_sum": 0,
        "pagoda_seconds_count": 0,
        "pagoda_seconds_bucket le=0.1": 0,
        "pagoda_seconds_bucket le=1.0": 0,
        "pagoda_seconds_bucket le=+Inf": 0,
    }
    for value in (0.05, 0.5, 0.1, 7.0):
        recorder.observe(HISTOGRAM, value)
    for _ in range(3):
        recorder.increment(COUNTER, 2, kind="x")
        exporter.flush()
        exporter.flush()
    recorder.set(GAUGE, 0.5)
    exporter.flush()
    assert agent.values == {
        "pagoda_seconds_sum": pytest.approx(7.65),
        "pagoda_seconds_count": 4,
        "pagoda_seconds_bucket le=0.1": 2,
        "pagoda_seconds_bucket le=1.0": 3,
        "pagoda_seconds_bucket le=+Inf": 4,
        "pagoda_things kind=x": 6,
        "pagoda_level": 0.5,
    }


def test_unchanged_values_are_sent_again(agent: Agent) -> None:
    """Else Ray's agent drops them: an idle engine disappeared after 20 s."""
    recorder = Recorder([HISTOGRAM])
    recorder.set(GAUGE, 1.0)
    exporter = RayExporter(recorder)
    exporter.flush()
    sent = dict(agent.values)
    agent.values.clear()
    exporter.flush()
    assert agent.values == sent


def test_an_ingress_sends_its_name_and_refreshes_first(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        class replica_id:  # noqa: N801
            unique_id = "i1"

    monkeypatch.setattr(ray_exporter.serve, "get_replica_context", Context)
    recorder = Recorder()
    exporter = RayExporter(recorder, label="ingress", refresh=lambda: recorder.set(GAUGE, 3.0), period_s=60.0)
    exporter.start()
    exporter.stop()
    assert agent.values == {"pagoda_level ingress=i1": 3.0}


def test_a_failing_metric_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Series] = []
    logged: list[str] = []

    def send(series: Series, previous: Series | None, process: dict[str, str]) -> None:
        if series.metric is COUNTER:
            raise RuntimeError("no agent")
        sent.append(series)

    monkeypatch.setattr(ray_exporter, "_send", send)
    monkeypatch.setattr(ray_exporter.logger, "exception", lambda message, name: logged.append(name))
    recorder = Recorder()
    exporter = RayExporter(recorder, period_s=0.01)
    recorder.increment(COUNTER, kind="x")
    recorder.set(GAUGE, 1.0)
    exporter.start()
    until(lambda: sent, "a value is sent", pause_s=0.001)
    recorder.set(GAUGE, 2.0)
    exporter.stop()
    assert (sent[0].value, sent[-1].value) == (1.0, 2.0)
    assert logged == ["things"]

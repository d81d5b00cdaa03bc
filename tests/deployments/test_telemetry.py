"""The recorder, the Prometheus text and the values for Ray's agent."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deployments.telemetry import INGRESS_METRICS, RayExporter, Recorder, Series, _representatives, render
from engine.metrics import METRICS, Metric

COUNTER = Metric("things", "counter", "Things.", ("kind",))
GAUGE = Metric("level", "gauge", "Level.")
HISTOGRAM = Metric("seconds", "histogram", "Seconds.", (), (0.1, 1.0))


def _samples(text: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_text_has_every_replica_under_one_family() -> None:
    recorders = {"r1": Recorder(), "r2": Recorder()}
    for number, recorder in enumerate(recorders.values(), start=1):
        recorder.increment(COUNTER, number, kind="x")
        recorder.set(GAUGE, 0.5 * number)
    for value in (0.05, 0.5, 0.1, 7.0):
        recorders["r1"].observe(HISTOGRAM, value)
    text = render({name: pickle.loads(pickle.dumps(r.snapshot())) for name, r in recorders.items()}, {})
    assert text.count(b"# TYPE pagoda_things_total counter") == 1
    samples = _samples(text)
    assert samples["pagoda_things_total kind=x replica=r2"] == 2
    assert samples["pagoda_level replica=r1"] == 0.5
    assert samples["pagoda_seconds_bucket le=0.1 replica=r1"] == 2
    assert samples["pagoda_seconds_bucket le=1.0 replica=r1"] == 3
    assert samples["pagoda_seconds_bucket le=+Inf replica=r1"] == 4
    assert samples["pagoda_seconds_sum replica=r1"] == pytest.approx(7.65)


def test_no_name_is_defined_twice_and_all_render() -> None:
    everything = [*METRICS, *INGRESS_METRICS]
    assert len({metric.name for metric in everything}) == len(everything)
    recorder = Recorder()
    for metric in everything:
        labels = dict.fromkeys(metric.labels, "x")
        verb = {"counter": recorder.increment, "gauge": recorder.set, "histogram": recorder.observe}[metric.kind]
        verb(metric, 1.0, **labels)
    assert len(list(text_string_to_metric_families(render({"r": recorder.snapshot()}, {}).decode()))) == len(everything)


def test_threads_lose_no_count() -> None:
    recorder = Recorder()
    threads = [
        threading.Thread(target=lambda: [recorder.increment(COUNTER, kind="x") for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.snapshot()[0].value == 20_000


@example([0.1015625])
@given(st.lists(st.floats(0.06, 1.9), min_size=1, max_size=30))
def test_what_ray_is_told_falls_into_the_same_buckets(values: list[float]) -> None:
    recorder = Recorder()
    for value in values:
        recorder.observe(HISTOGRAM, value)
    series = recorder.snapshot()[0]
    stand_ins = _representatives(HISTOGRAM.buckets, list(series.counts), series.value)
    again = Recorder()
    for value, count in zip(stand_ins, series.counts, strict=True):
        for _ in range(count):
            again.observe(HISTOGRAM, value)
    assert again.snapshot()[0].counts == series.counts
    assert again.snapshot()[0].value == pytest.approx(series.value, rel=0.05)


def test_a_metric_that_cannot_be_sent_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Series] = []
    logged: list[str] = []

    def send(series: Series, previous: Series | None) -> None:
        if series.metric is COUNTER:
            raise RuntimeError("no agent")
        sent.append(series)

    monkeypatch.setattr("deployments.telemetry._send", send)
    monkeypatch.setattr("deployments.telemetry.logger.exception", lambda message, name: logged.append(name))
    recorder = Recorder()
    exporter = RayExporter(recorder, period_s=0.01)
    recorder.increment(COUNTER, kind="x")
    recorder.set(GAUGE, 1.0)
    exporter.start()
    while not sent:
        time.sleep(0.001)
    recorder.set(GAUGE, 2.0)
    exporter.stop()
    assert [series.value for series in sent] == [1.0, 2.0]
    assert logged == ["things"]

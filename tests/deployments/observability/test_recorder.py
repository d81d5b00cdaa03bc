"""The recorder and the Prometheus text."""

from __future__ import annotations

import pickle
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.observability.ingress_metrics import INGRESS_METRICS
from deployments.observability.prometheus import render
from deployments.observability.recorder import Recorder
from engine.observability.metrics import METRICS, Metric

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


def test_each_family_has_the_series_of_all_replicas() -> None:
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


def test_concurrent_increments_are_not_lost() -> None:
    recorder = Recorder()
    threads = [
        threading.Thread(target=lambda: [recorder.increment(COUNTER, kind="x") for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.snapshot()[0].value == 20_000


def test_known_labels_start_at_zero() -> None:
    samples = _samples(render({"r": Recorder(METRICS).snapshot()}, {"i": Recorder(INGRESS_METRICS).snapshot()}))
    assert not any(samples.values())
    for reason in ("stop", "length", "abort", "error"):
        assert f"pagoda_requests_finished_total reason={reason} replica=r" in samples
    for kind in ("swap", "recompute"):
        assert f"pagoda_preemptions_total kind={kind} replica=r" in samples
    for outcome in ("hit", "cold", "balanced", "fallback", "retry"):
        assert f"pagoda_routing_decisions_total ingress=i outcome={outcome}" in samples
    for name in (
        "requests_rejected_total reason=overloaded replica=r",
        "prompt_tokens_total replica=r",
        "time_to_first_token_seconds_count replica=r",
        "step_seconds_count phase=forward replica=r",
        "kv_index_gaps_total ingress=i",
        "request_migrations_total ingress=i",
        "ingress_rejections_total ingress=i reason=overloaded",
        "kv_index_lag_seconds_bucket ingress=i le=+Inf",
    ):
        assert f"pagoda_{name}" in samples


def test_counting_continues_from_the_initial_zero() -> None:
    recorder = Recorder([COUNTER, HISTOGRAM, GAUGE])
    assert [series.metric for series in recorder.snapshot()] == [HISTOGRAM]  # COUNTER's values are not known before
    recorder.observe(HISTOGRAM, 0.5)
    assert [series.counts for series in recorder.snapshot()] == [(0, 1, 0)]

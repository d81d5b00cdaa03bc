"""The cost of metrics: the benchmark turns them on and off, and both sides do the same work."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules warn while they are imported
    import deployments.observability.ray_exporter  # noqa: F401

from benchmarks import telemetry
from benchmarks.workloads import Request, Workload
from deployments.observability.recorder import Recorder
from engine.observability.metrics import GENERATION_TOKENS, STEP_TOKENS, Metric, NullSink
from tests.benchmarks.test_throughput import SMALL

seen: list[list[float]] = []


class Witness:
    """A part that reads the recorder when it stops."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def start(self) -> None:
        seen.append([])

    def stop(self) -> None:
        seen[-1] += [item.value for item in self._recorder.snapshot() if item.metric is GENERATION_TOKENS]


def test_half_of_the_runs_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "NULL_STEPS", 50)
    file, out = tmp_path / "small.json", tmp_path / "result.json"
    Workload("small", [Request([5, 6, 7], 3), Request([8, 9], 2)]).write(file)
    part = f"{__name__}:Witness"
    seen.clear()
    arguments = [*SMALL, "--workload", str(file), "--repeats", "2", "--part", part, "--out", str(out)]
    telemetry.main(arguments)
    result = json.loads(out.read_text())
    assert result["on"] == [*telemetry.PARTS, part]
    measured = result["throughput"]
    assert len(measured["output_tokens_per_s_off"]) == len(measured["output_tokens_per_s_on"]) == 2
    assert measured["on_by_off"] == pytest.approx(measured["median_on"] / measured["median_off"], abs=1e-4)
    assert "on by off" in capsys.readouterr().out
    assert seen == [[5.0], [5.0]]


class SlowSink(NullSink):
    """Takes a millisecond of its own clock for one observation of each step."""

    now = 0.0

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        if metric is STEP_TOKENS:
            self.now += 0.001


def test_the_sinks_time_is_in_the_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = SlowSink()
    monkeypatch.setattr(telemetry, "NULL_STEPS", 100)
    monkeypatch.setattr(telemetry, "perf_counter", lambda: sink.now)
    assert telemetry.step_microseconds(sink) == pytest.approx(1000)


def test_a_part_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        telemetry.main([*SMALL, "--part", "benchmarks.telemetry:Scrapper"])
    assert "'benchmarks.telemetry:Scrapper' names no class; give" in capsys.readouterr().err

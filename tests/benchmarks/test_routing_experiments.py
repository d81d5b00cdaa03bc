"""How the experiments evaluate their runs; the simulator is replaced by a formula."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from math import exp, log
from typing import Any

import pytest

from benchmarks.routing import decision, experiments
from benchmarks.routing.runs import Run


def test_a_trace_gets_the_constant_that_the_other_traces_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"mooncake": 7.5, "no sharing": 15.0, "bursts": 15.0, "agents": 15.0, "documents": 30.0}

    def run_all(runs: Sequence[Run], processes: int) -> list[dict[str, Any]]:
        assert processes == 2
        seconds = [exp(abs(log(run.parameters["first_token_weight"] / best[run.trace]))) for run in runs]
        return [{"ttft_mean": s, "ttft_p90": 2 * s, "whole_mean": 30 * s, "hit": 0.3} for s in seconds]

    monkeypatch.setattr(experiments, "run_all", run_all)
    result = experiments.leave_one_out("trace.jsonl", 2)
    assert {trace: row["best"] for trace, row in result.items()} == best
    assert {row["chosen by the others"] for row in result.values()} == {15.0}
    assert result["documents"]["by weight"]["15.0"] == {"ttft_mean": 2.0, "ttft_p90": 4.0, "whole_mean": 60.0}
    best["no sharing"] = best["bursts"] = 30.0
    assert experiments.leave_one_out("trace.jsonl", 2)["mooncake"]["chosen by the others"] == 30.0


def test_decisions_are_timed_for_each_kind_of_prompt() -> None:
    thresholds = gc.get_threshold()
    results = decision.measure(3, 2, pulls=True)
    assert results["index_blocks"] == 8 * 64 + 3 * 8 * (2_048 - 64)
    assert results["kinds"].keys() == {"cold", "system prompt", "partly cached", "fully cached"}
    for calls in results["kinds"].values():
        assert all(0 < figures["p50"] <= figures["p99.9"] for figures in calls.values())
        assert calls["choose"]["p50"] < calls["choose and sent"]["p50"]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)

"""The benchmark of draft tokens: every workload, with the same answers, and what a result has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from kernels.cpu.library import library
from tests.benchmarks.test_throughput import SMALL

# Without the C kernels a row's bits depend on the other rows of its step, so an answer may be another one.
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


def test_every_workload_is_measured_with_the_same_answers(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    sizes = ["--tokens", "24", "--repeats", "2", "--streams", "1", "3", "--draft-tokens", "4"]
    speculation.main([*SMALL, "--engine-option", "max_decode_slowdown=null", *sizes, "--out", str(out)])
    rows = json.loads(out.read_text())["results"]
    assert [(row["streams"], row["workload"]) for row in rows] == [
        (streams, workload) for streams in (1, 3) for workload in speculation.WORKLOADS
    ]
    for row in rows:
        assert row["off_tokens_per_s"] > 0
        assert row["on_tokens_per_s"] > 0
        assert 0 <= row["accepted"] <= row["drafted"]
    shares = {row["workload"]: row["accepted"] / row["drafted"] for row in rows if row["workload"] != "random"}
    assert shares["edit"] > 0.5
    assert shares["planted 90%"] > shares["planted 50%"] > 0

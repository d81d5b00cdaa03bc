"""The benchmark of draft tokens: every workload, with the same answers, and what a result has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.checkpoints import keep_layers
from kernels.cpu.library import library
from tests.benchmarks.test_throughput import MODEL, SMALL

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


def test_a_draft_model_is_as_often_right_as_is_planted(tmp_path: Path) -> None:
    keep_layers(MODEL, tmp_path / "draft", 1)
    out = tmp_path / "result.json"
    sizes = ["--tokens", "40", "--repeats", "1", "--streams", "2", "--draft-tokens", "3"]
    sizes += ["--draft-model", str(tmp_path / "draft")]
    speculation.main([*SMALL, "--engine-option", "max_decode_slowdown=null", *sizes, "--out", str(out)])
    document = json.loads(out.read_text())
    assert 0 < document["share_of_bytes"] < 1
    rows = document["results"]
    assert [row["workload"] for row in rows] == list(speculation.DRAFT_MODEL)
    assert all(row["draft_ms"] > 0 for row in rows)
    shares = {row["workload"]: row["accepted"] / row["drafted"] for row in rows}
    assert 0.6 < shares["draft model 90%"] < 1.0
    assert shares["draft model 90%"] > shares["draft model 50%"] > 0.1

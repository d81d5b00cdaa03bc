"""The benchmark of earlier answers: every workload, with the same answers, and what a result has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import earlier_answers
from kernels.cpu.library import library

# Without the C kernels a row's bits depend on the other rows of its step, so an answer may be another one.
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


def test_every_workload_is_measured_with_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("NUM_QUESTIONS", 4), ("NUM_PHRASINGS", 3), ("NUM_QUOTES", 6), ("MIN_RANDOM", 4)):
        monkeypatch.setattr(earlier_answers, name, number)
    out, model = tmp_path / "result.json", str(Path(__file__).parents[2] / "demo" / "model")
    sizes = ["--max-model-len", "512", "--engine-option", "kv_cache_memory=16MiB", "--tokens", "40"]
    always = ["--engine-option", "max_decode_slowdown=null", "--repeats", "1", "--streams", "2"]
    earlier_answers.main(["--model", model, *sizes, *always, "--out", str(out)])
    rows = {row["workload"]: row for row in json.loads(out.read_text())["results"]}
    assert tuple(rows) == earlier_answers.WORKLOADS
    for row in rows.values():
        assert row["off_tokens_per_s"] > 0
        assert row["on_tokens_per_s"] > 0
        assert 0 <= row["accepted"] <= row["drafted"]
        assert 0 < row["drafter_share"] < 1
    for name in ("questions", "quotes"):
        assert rows[name]["accepted"] > 0.5 * rows[name]["drafted"] > 0
        assert rows[name]["on_steps"] < 0.8 * rows[name]["off_steps"]

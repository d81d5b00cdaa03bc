"""The benchmark of transfers between two processes runs, and its result has what its page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.transfers import measure
from tests.engine.checkpoints import build_model, save_checkpoint


@pytest.mark.long
def test_a_prompt_is_pulled_and_computed(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("qwen3"), tmp_path)
    options = {"skip_tokenizer_init": True, "num_threads": 1, "num_blocks": 200, "swap_space_gib": 0.02}
    result = measure(path, options, num_tokens=320, rounds=1)
    (record,) = result["rounds"]
    assert record["pull_s"] > record["of_it_fetch_s"] > 0 < record["compute_s"]
    assert result["share"] == pytest.approx(record["pull_s"] / record["compute_s"], rel=0.1)  # they are rounded
    assert result["wire_mb"] * 1e6 == pytest.approx(320 * result["bytes_per_token"], rel=0.2)
    assert result["wire_gb_per_s"] > 0 < result["wire_cold_ms"]

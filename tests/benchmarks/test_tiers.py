"""The benchmark of the tiers runs, and its prompts come from where it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers

MODEL = str(Path(__file__).parents[2] / "demo" / "model")
NUM_TOKENS = 700  # more than the KV cache has room for beside a second prompt


@pytest.mark.long
def test_prompts_come_from_the_tier_that_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--model", MODEL, "--tokens", str(NUM_TOKENS), "--prompts", "3", "--rounds", "1"]
    tiers.main([*arguments, "--answer-tokens", "4", "--directory", str(tmp_path), "--out", str(out)])
    cached = json.loads(out.read_text())["cached_tokens"]
    full = NUM_TOKENS // 16 * 16
    assert cached["computed"] == [0] * 3
    assert cached["host"] == [full] * 3
    assert cached["disk"] == cached["disk, not in the page cache"] == [full] * 3

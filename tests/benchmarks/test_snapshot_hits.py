"""The hit rate of a trace with snapshots of states, beside that with a snapshot at every block."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks.kv_memory.snapshot_hits import BLOCK_SIZE, measure


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations of four turns, side by side, of which every second begins with one system prompt."""
    rng, fresh = random.Random(3), itertools.count(100)
    chats = [list(range(8)) if chat % 2 else [] for chat in range(24)]
    lines = []
    for _ in range(4):
        for blocks in rng.sample(chats, len(chats)):
            blocks += [next(fresh) for _ in range(rng.randint(1, 6))]
            length = len(blocks) * BLOCK_SIZE - rng.randint(0, BLOCK_SIZE - 1)
            fields = {"hash_ids": blocks, "input_length": length, "output_length": rng.randint(1, 200)}
            lines.append(json.dumps(fields))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("memory_gib", [8, 24])
def test_nine_in_ten_of_the_tokens_that_could_be_saved_are(trace: Path, memory_gib: int) -> None:
    without, by_default, _ = measure(memory_gib * 2**30, trace)
    assert 0.1 < by_default.hit_rate <= by_default.every_block
    assert by_default.share >= 0.9
    assert by_default.share >= without.share

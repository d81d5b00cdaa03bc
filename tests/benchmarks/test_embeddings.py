"""The benchmark of embeddings: both of its ways compute the same vectors."""

from __future__ import annotations

from pathlib import Path

from benchmarks.embeddings import BATCH, measure


def test_both_ways_compute_the_same_vectors(tmp_path: Path) -> None:
    record = measure("tiny", tmp_path, 1, threads=1)
    assert record["num_texts"] == BATCH
    assert record["largest_difference"] < 1e-5
    assert set(record["texts_per_s"]) == {"engine", "padded"}

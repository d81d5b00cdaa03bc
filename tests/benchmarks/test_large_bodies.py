"""The requests that benchmarks.large_bodies sends, and its ratios."""

from __future__ import annotations

import json

from benchmarks.large_bodies import MAX_BYTES, Phase, ratios, requests_of


def test_the_requests_have_about_the_longest_bodies() -> None:
    for name, (_, body) in requests_of("generate").items():
        size = len(json.dumps(body, separators=(",", ":")))
        assert 0.95 * MAX_BYTES < size < 16 * 2**20, (name, size)
    assert len(requests_of("embed")["texts"][1]["input"]) == 2048


def test_ratios_are_those_of_the_medians() -> None:
    def phase(name: str, gap: float | None, health: float) -> Phase:
        return Phase(name, {}, None, gap, gap, gap, health, health, health)

    phases = [phase("", 2.0, 1.0), phase("texts", 3.0, 1.0), phase("", 4.0, 1.0), phase("texts", 6.0, 2.0)]
    assert ratios(phases)["texts"] == {"gap_p50": 1.5, "gap_p99": 1.5, "health_p50": 1.5, "health_p99": 1.5}
    without_streams = [phase("", None, 1.0), phase("texts", None, 2.0)]
    assert ratios(without_streams)["texts"] == {"health_p50": 2.0, "health_p99": 2.0}

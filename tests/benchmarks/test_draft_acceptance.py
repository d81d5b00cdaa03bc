"""The benchmark of draft models: its probabilities are those of draws, and what the engine accepts agrees with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import draft_acceptance
from kernels.cpu.library import library


def test_probabilities_are_those_of_draws() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 6, generator=generator).double()
    p, q = logits.softmax(dim=1)
    independent, same_noise, rejection, bound = draft_acceptance.acceptance(p[None], q[None])
    draws = 200_000
    noise = [-torch.empty(draws, 6).exponential_(generator=generator).log() for _ in range(2)]
    own = [(logits[index] + noise[index]).argmax(dim=1) for index in range(2)]
    shared = (logits[1] + noise[0]).argmax(dim=1)
    is_kept = torch.rand(draws, generator=generator) < (p / q)[own[1]]
    for exact, drawn in ((independent, own[0] == own[1]), (same_noise, own[0] == shared), (rejection, is_kept)):
        assert exact == pytest.approx(float(drawn.double().mean()), abs=0.006)  # five standard deviations
    assert independent < same_noise
    assert bound <= same_noise <= rejection
    assert draft_acceptance.acceptance(p[None], p[None])[1:] == (1.0, 1.0, 1.0)


@pytest.mark.long
@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_every_draft_model_is_compared_at_every_temperature(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    draft_acceptance.main(["--steps", "4", "--questions", "2", "--max-tokens", "6", "--out", str(out)])
    records = json.loads(out.read_text(encoding="utf-8"))["records"]
    assert [record["temperature"] for record in records[::2]] == list(draft_acceptance.TEMPERATURES)
    for distilled, quantized in zip(records[::2], records[1::2], strict=True):
        assert 0 <= distilled["bound"] <= distilled["same_noise"] <= distilled["rejection"] <= 1
        assert quantized["measured"] > 0.5
        assert quantized["gained"] > 1

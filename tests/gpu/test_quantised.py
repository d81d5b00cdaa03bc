"""What a GPU answers for weights that stay codes is what the CPU answers for the dequantised ones, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from tests.gpu_rehearsal.coded_models import SAVE
from tests.gpu_rehearsal.rounded_cache import forced_logprobs, texts
from tests.gpu_rehearsal.scenarios import OPTIONS, PARAMS, Scenario, answers, generate

SCENARIO = Scenario([PARAMS[name] for name in ("greedy", "drawn", "logprobs", "three answers")], [30, 1, 60, 17])
MOST_OF_ROUNDING = 0.2  # of log-probabilities, as a root mean square
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "batch_invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("kind", [kind for kind in SAVE if kind != "fp8 of activations"])
def test_answers_are_those_of_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    path = str(SAVE[kind](tmp_path))
    options = {**OPTIONS, "skip_tokenizer_init": True}
    expected = answers(generate(LLM(path, **{**options, "device": "cpu", "quantization": "dequantize"}), SCENARIO))
    for way, chosen in WAYS.items():
        llm = LLM(path, **{**options, **chosen, "device": "cuda"})
        for _ in range(2):  # the second time much comes from the prefix cache
            assert answers(generate(llm, SCENARIO)) == expected, way


def test_quantised_activations_change_answers_little(tmp_path: Path) -> None:
    """The CPU does not quantise them: log-probabilities of the same tokens differ by what rounding to FP8 does."""
    path = str(SAVE["fp8 of activations"](tmp_path))
    options = {**OPTIONS, "skip_tokenizer_init": True}
    exact, got = (forced_logprobs(LLM(path, **{**options, "device": device}), texts()) for device in ("cpu", "cuda"))
    assert 0 < float((got - exact).square().mean().sqrt()) < MOST_OF_ROUNDING

"""Keys and values in FP8 on a GPU answer what a CPU answers whose cache is rounded alike, in float32.

A key that both round from nearly the same number has the same code, but for one in a million, and that moves a logit by
little: so tokens are equal and log-probabilities within ``LOGPROB_TOLERANCE``, as with a cache in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from tests.gpu_rehearsal.rounded_cache import KEY_SCALE, VALUE_SCALE, rounded_answers, with_scales
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS, SCENARIOS, answers, generate

WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "one step at a time": {"async_scheduling": False},
}


def load(path: str = DEMO_MODEL, **options: Any) -> LLM:
    return LLM(path, **{**OPTIONS, "device": "cuda", "kv_cache_dtype": "fp8", **options})


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        return {
            name: answers(rounded_answers(patch, DEMO_MODEL, SCENARIOS[name]))
            for name in ("every parameter", "drafts", "swapped")
        }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["every parameter", "drafts", "swapped"])
def test_a_scenario(name: str, way: str, expected: dict[str, Any]) -> None:
    llm = load(**SCENARIOS[name].options, **WAYS[way])
    for _ in range(2):  # the second time much comes from the prefix cache
        assert answers(generate(llm, SCENARIOS[name])) == expected[name]


def test_the_checkpoints_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, scenario = with_scales(tmp_path), SCENARIOS["one at a time"]
    expected = answers(rounded_answers(monkeypatch, path, scenario, KEY_SCALE, VALUE_SCALE))
    assert answers(generate(load(path, **scenario.options), scenario)) == expected

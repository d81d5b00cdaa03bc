"""What a GPU answers is what the CPU answers: every sampling parameter, and tiny models of every family, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from tests.gpu.tiny_checkpoints import ADAPTER, CHECKPOINTS
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS, PARAMS, SCENARIOS, Scenario, answers, generate

Options = dict[str, Any]
WAYS: dict[str, Options] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "one step at a time": {"async_scheduling": False},
    "batch_invariant": {"batch_invariant": True},
}
ONE_GPU = [name for name in SCENARIOS if name not in ("two ranks", "flash_attn")]
SCENARIO = Scenario([PARAMS[name] for name in ("greedy", "drawn", "logprobs", "three answers")], [30, 1, 60, 17])
FAMILY: Options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 48, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def expected() -> Callable[[str], Any]:
    """What the CPU answers to a scenario."""
    by_scenario: dict[str, Any] = {}

    def answer(name: str) -> Any:
        if name not in by_scenario:
            options = {**OPTIONS, **SCENARIOS[name].options, "device": "cpu"}
            by_scenario[name] = answers(generate(LLM(DEMO_MODEL, **options), SCENARIOS[name]))
        return by_scenario[name]

    return answer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ONE_GPU)
def test_a_scenario(name: str, way: str, expected: Callable[[str], Any]) -> None:
    llm = LLM(DEMO_MODEL, **{**OPTIONS, **SCENARIOS[name].options, **WAYS[way], "device": "cuda"})
    for _ in range(2):  # the second time much comes from the prefix cache
        assert answers(generate(llm, SCENARIOS[name])) == expected(name)


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_family(family: str, tmp_path: Path) -> None:
    path = CHECKPOINTS[family](tmp_path)
    options = {**OPTIONS, **FAMILY}
    if family in ADAPTER:
        options["model_impl"] = "transformers"
    on_cpu = answers(generate(LLM(path, **options, device="cpu"), SCENARIO))
    for way in ("graphs", "eager"):
        llm = LLM(path, **{**options, **WAYS[way], "device": "cuda"})
        for _ in range(2):
            assert answers(generate(llm, SCENARIO)) == on_cpu, way

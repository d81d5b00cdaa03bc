"""What a GPU answers is what the CPU answers: every sampling parameter, and tiny models of every family, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import keep_layers
from engine.llm import LLM
from tests.engine.models.test_speculative_generation import DraftCounter
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


@pytest.mark.parametrize("way", ["graphs", "eager"])
@pytest.mark.parametrize("name", ["every parameter", "swapped"])
def test_a_draft_model_changes_no_answer(
    name: str, way: str, expected: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with seeds, penalties and grammars: drafts of one layer of the demo model, and of all of them."""
    keep_layers(Path(DEMO_MODEL), tmp_path, 1)
    for path, is_right in ((str(tmp_path), False), (DEMO_MODEL, True)):
        drafts = DraftCounter(monkeypatch)
        config = {"method": "draft_model", "model": path, "num_speculative_tokens": 4}
        options = {**OPTIONS, **SCENARIOS[name].options, **WAYS[way], "device": "cuda"}
        llm = LLM(DEMO_MODEL, **options, speculative_config=config, max_decode_slowdown=None)
        for _ in range(2):
            assert answers(generate(llm, SCENARIOS[name])) == expected(name)
        assert drafts.num_drafted > 10
        assert not is_right or drafts.num_accepted > 0.9 * drafts.num_drafted  # rounding may decide

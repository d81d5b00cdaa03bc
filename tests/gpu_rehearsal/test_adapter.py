"""A model that transformers' modules compute, on a simulated GPU: the CPU's answers, waits and launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.llm import LLM
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import OPTIONS, PARAMS, VOCAB_SIZE, Scenario, answers, generate, watch
from tests.gpu_rehearsal.test_launches_a_step import launches_of_a_decode

A_LAYER, A_STEP = 55, 30  # launches of a layer, and of the rest of a step; our own decoder's are 10 and 20 at most
SCENARIO = Scenario([PARAMS[name] for name in ("greedy", "drawn", "logprobs")], [30, 1, 150])
ADAPTER: dict[str, Any] = {"skip_tokenizer_init": True, "model_impl": "transformers"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the directories of models of one and of two layers."""
    models = [build_model("qwen3", num_hidden_layers=layers, vocab_size=VOCAB_SIZE) for layers in (1, 2)]
    return [save_checkpoint(model, tmp_path_factory.mktemp("qwen3")) for model in models]


@pytest.fixture(scope="module")
def expected(paths: list[str]) -> Any:
    """Return the CPU's answers; made before a test simulates the GPU."""
    return answers(generate(LLM(paths[1], **(OPTIONS | ADAPTER), device="cpu"), SCENARIO))


@pytest.fixture(autouse=True)
def modules_get_new_parameters() -> Iterator[None]:
    """Let `Module.to` make new parameters: the simulated GPU's tensors cannot become the data of the old ones."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_answers_are_those_of_the_cpu(paths: list[str], expected: Any, gpu: Rehearsal) -> None:
    llm = gpu.start(paths[1], **ADAPTER)
    seen = watch(llm.engine, gpu.machine)
    assert answers(generate(llm, SCENARIO)) == expected
    assert {"mixed", "decode"} <= set(seen.steps)
    assert set(seen.waits) == {1}
    gpu.machine.check()


def test_launches_of_a_decode(paths: list[str], gpu: Rehearsal) -> None:
    single, two = (launches_of_a_decode(gpu, gpu.start(path, dtype="bfloat16", **ADAPTER), 1) for path in paths)
    assert two - single <= A_LAYER, f"a layer makes {two - single} launches"
    assert single <= A_LAYER + A_STEP, f"a step of one layer makes {single} launches"
    gpu.machine.check()

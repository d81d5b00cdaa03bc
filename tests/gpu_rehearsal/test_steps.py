"""Steps of every kind on a GPU: each waits once, and answers what the CPU answers."""

from __future__ import annotations

import pytest

from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import SCENARIOS, answers, generate, watch

KINDS = {
    "every parameter": {"prefill", "mixed", "decode", "a grammar", "beams", "block_copies", "prompt log-probabilities"},
    "one at a time": {"prefill", "decode"},
    "flat": {"prefill", "decode"},
    "drafts": {"prefill", "drafts", "prompt log-probabilities"},
    "swapped": {"swap_out", "swap_in", "block_copies", "beams"},
    "two ranks": {"swap_out", "swap_in", "block_copies", "beams", "a grammar", "prompt log-probabilities"},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario(name: str, cpu_answers: dict[str, object], gpu: Rehearsal) -> None:
    scenario = SCENARIOS[name]
    gpu.machine.max_waits = scenario.max_waits
    llm = gpu.start(**scenario.options)
    assert llm.engine.info.device == "cuda:0"
    assert llm.engine.info.attention_backend == "triton"
    seen = watch(llm.engine, gpu.machine)
    outputs = generate(llm, scenario)
    assert not KINDS[name] - set(seen.steps), f"the scenario made only {seen.steps}"
    assert max(seen.waits) == scenario.max_waits
    assert answers(outputs) == cpu_answers[name]
    gpu.machine.check()

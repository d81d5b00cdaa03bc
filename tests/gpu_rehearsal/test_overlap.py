"""Steps that are launched while the GPU computes the one before: each waits once, for its own end only."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduling.scheduler_output import SchedulerOutput
from engine.worker.step_plan import StepPlan
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import SCENARIOS, answers, generate

# A call of Engine.step that finds too few blocks collects the step that it has launched too.
MAX_WAITS = {"every parameter": 1, "one at a time": 1, "flat": 1, "drafts": 1, "swapped": 2}


@pytest.mark.parametrize("name", MAX_WAITS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_scenario_with_overlap(
    name: str, enforce_eager: bool, cpu_answers: dict[str, object], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, num_taken, take = SCENARIOS[name], 0, StepPlan.take_sampled

    def count(plan: StepPlan, *args: Any) -> None:
        nonlocal num_taken
        num_taken += plan.num_pending
        take(plan, *args)

    monkeypatch.setattr(StepPlan, "take_sampled", count)
    gpu.machine.max_waits = MAX_WAITS[name]
    llm = gpu.start(async_scheduling=True, enforce_eager=enforce_eager, **scenario.options)
    assert answers(generate(llm, scenario)) == cpu_answers[name]
    gpu.machine.check()
    assert num_taken > (2 if name == "drafts" else 5)  # those that may get drafts wait for their last token


def test_a_step_is_launched_before_the_gpu_has_computed_the_one_before(gpu: Rehearsal) -> None:
    gpu.machine.max_waits = MAX_WAITS["one at a time"]
    llm = gpu.start(async_scheduling=True)
    runner, clock = llm.engine.runner, gpu.machine.clock
    start, still_busy = runner.start, []

    def watched(output: SchedulerOutput) -> Any:
        still_busy.append(clock.done_at[0] > clock.now)
        return start(output)

    runner.start = watched  # type: ignore[method-assign]
    generate(llm, SCENARIOS["one at a time"])
    gpu.machine.check()
    assert sum(still_busy) > len(still_busy) // 2

"""Helpers that add requests to an engine with a shadow runner and make single steps."""

from __future__ import annotations

from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.shadow import check_integrity


def add(engine: Engine, request_id: str, length: int, max_tokens: int = 4, first: int = 0, priority: int = 0) -> None:
    prompt = [(first + i) % 64 for i in range(length)]
    engine.add_request(EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), priority=priority))


def step_sizes(engine: Engine) -> dict[str, int]:
    """Schedule one step and return how many tokens each request computes in it."""
    output = engine.scheduler.schedule()
    engine.scheduler.update(output, engine.runner.run(output, None))  # type: ignore[arg-type]
    return {sequence.request_id: count for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True)}


def make_step(engine: Engine) -> tuple[list[str], SchedulerOutput]:
    """Make one step; return the request of each scheduled sequence, and the step."""
    output = engine.scheduler.schedule()
    engine.scheduler.update(output, engine.runner.run(output, None))  # type: ignore[arg-type]
    check_integrity(engine)
    return [sequence.request_id for sequence in output.sequences], output

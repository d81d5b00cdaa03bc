"""The events of an engine: their order, and that every request leaves exactly once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.engine import Engine
from engine.errors import OverloadedError, RequestError
from engine.observability.observer import EngineObserver
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput, StepTimes
from engine.sequence import Sequence, SequenceGroup
from tests.engine.shadow import make_engine, run_to_end


class Recorder(EngineObserver):
    """Keeps the events by name, with the request's id where there is one."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def request_rejected(self, error: RequestError) -> None:
        self.events.append(f"rejected {error.param}")

    def request_added(self, group: SequenceGroup, arrived: float) -> None:
        self.events.append(f"added {group.request_id}")

    def step_started(self) -> None:
        self.events.append("started")

    def step_scheduled(self, output: SchedulerOutput) -> None:
        self.events.append("scheduled")

    def step_finished(self, output: SchedulerOutput, updated: Iterable[Sequence], times: StepTimes) -> None:
        self.events.append("finished")

    def sequence_ended(self, sequence: Sequence) -> None:
        self.events.append(f"ended {sequence.request_id}.{sequence.index}")

    def request_left(self, group: SequenceGroup, rejection: OverloadedError | None) -> None:
        assert group.is_finished
        self.events.append(f"left {group.request_id}" if rejection is None else f"displaced {group.request_id}")

    def state_changed(self) -> None:
        self.events.append("changed")


def observed(**options: object) -> tuple[Engine, list[str]]:
    engine, _ = make_engine(**options)  # type: ignore[arg-type]
    recorder = Recorder()
    engine.observers.members.append(recorder)
    return engine, recorder.events


def test_a_request_that_finishes_leaves_after_its_last_step() -> None:
    engine, events = observed()
    engine.add_request(EngineRequest("a", [1, 2], SamplingParams(max_tokens=2)))
    run_to_end(engine)
    step = ["started", "scheduled", "finished"]
    assert events == ["added a", *step, *step, "left a"]


def test_an_aborted_request_leaves_once() -> None:
    engine, events = observed()
    engine.add_request(EngineRequest("a", [1], SamplingParams(max_tokens=9)))
    assert engine.abort("a")
    assert not engine.abort("a")
    assert events == ["added a", "left a", "changed"]


def test_a_request_leaves_with_the_last_of_its_answers() -> None:
    engine, events = observed()
    engine.add_request(EngineRequest("a", [1], SamplingParams(n=2, max_tokens=9)))
    engine.step()
    events.clear()
    assert engine.end_sequence("a", 0)
    assert engine.end_sequence("a", 1)
    assert events == ["ended a.0", "changed", "ended a.1", "left a", "changed"]


def test_a_request_that_is_rejected_to_make_room_leaves_before_the_other_is_added() -> None:
    engine, events = observed(max_num_seqs=1, max_queued_requests=1)
    rejected: dict[str, OverloadedError] = {}
    params = SamplingParams(max_tokens=3)
    engine.queue_request(EngineRequest("running", [1], params), on_rejected=rejected.__setitem__)
    engine.step()
    events.clear()
    engine.queue_request(EngineRequest("low", [2], params), on_rejected=rejected.__setitem__)
    engine.queue_request(EngineRequest("high", [3], params, priority=1), on_rejected=rejected.__setitem__)
    with pytest.raises(OverloadedError):
        engine.queue_request(EngineRequest("late", [4], params), on_rejected=rejected.__setitem__)
    assert events == ["added low", "displaced low", "added high", "rejected None"]
    assert list(rejected) == ["low"]


def test_an_invalid_request_is_rejected_and_never_leaves() -> None:
    engine, events = observed()
    with pytest.raises(RequestError):
        engine.add_request(EngineRequest("a", [], SamplingParams()))
    assert events == ["rejected prompt"]

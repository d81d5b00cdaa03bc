"""In which order the waiting requests of several clients start."""

from __future__ import annotations

from engine.engine import Engine
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.shadow import make_engine


def _add(engine: Engine, *names: str, priority: int = 0) -> None:
    """Queue requests, the first character of whose names is the client."""
    for name in names:
        prompt, params = [ord(name[0]) % 64, len(engine.scheduler.waiting)], SamplingParams(max_tokens=1)
        engine.add_request(EngineRequest(name, prompt, params, priority=priority, client=name[0]))


def _ended(engine: Engine, num_steps: int = 100) -> list[str]:
    """Return the requests that end in the next steps, each in one of its own."""
    ended = []
    while engine.has_unfinished and num_steps:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
        num_steps -= 1
    return ended


def test_a_burst_of_one_client_does_not_make_the_others_wait() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert _ended(engine) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_client_that_comes_later_goes_behind_the_next_of_those_that_wait() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", "a3", "a4")
    assert _ended(engine, 2) == ["a1", "a2"]
    _add(engine, "b1", "b2")
    assert _ended(engine) == ["a3", "b1", "a4", "b2"]


def test_a_request_that_starts_takes_no_turn_from_those_of_its_client_after_it() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", "a3", "a4")
    assert _ended(engine, 1) == ["a1"]
    _add(engine, "a5", "b1", "b2")
    assert _ended(engine) == ["a2", "b1", "a3", "b2", "a4", "a5"]


def test_one_client_after_the_other_does_not_keep_a_request_waiting() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", "a3")
    ended = []
    for name in "bcdefghijk":  # each comes before the one before it has started
        _add(engine, f"{name}1")
        ended += _ended(engine, 1)
    assert ended[:6] == ["a1", "b1", "a2", "c1", "d1", "a3"]


def test_a_preempted_request_keeps_its_turn() -> None:
    engine = make_engine(max_num_seqs=2, num_blocks=6, block_size=4, enable_prefix_caching=False)[0]
    started: list[str] = []
    schedule = engine.scheduler.schedule

    def record() -> SchedulerOutput:
        output = schedule()
        started.extend(group.request_id for group in output.admitted)
        return output

    engine.scheduler.schedule = record  # type: ignore[method-assign]
    for name in ("a1", "b1"):  # together they need 8 blocks
        engine.add_request(EngineRequest(name, [1] * 8, SamplingParams(max_tokens=8), client=name[0]))
    engine.step()
    _add(engine, "b2", "c1")
    _ended(engine)
    assert started == ["a1", "b1", "b1", "b2", "c1"]


def test_requests_that_ended_while_they_waited_leave_no_turns_behind() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", "a3", "a4")
    for name in ("a1", "a2", "a3", "a4"):
        engine.abort(name)
    _add(engine, "b1", "b2", "a5")
    assert _ended(engine) == ["b1", "a5", "b2"]
    assert not engine.scheduler.queues._turns._clients


def test_a_request_that_ends_while_it_waits_brings_no_later_turn() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", "a3", "a4")
    engine.abort("a4")
    _add(engine, "b1", "b2")
    assert _ended(engine) == ["a1", "b1", "a2", "b2", "a3"]


def test_the_priority_comes_first() -> None:
    engine = make_engine(max_num_seqs=1)[0]
    _add(engine, "a1", "a2", priority=1)
    _add(engine, "b1")
    assert _ended(engine) == ["a1", "a2", "b1"]

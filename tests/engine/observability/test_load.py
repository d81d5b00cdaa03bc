"""The load that an engine reports."""

from __future__ import annotations

import pickle

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import StepTimes
from tests.engine.shadow import make_engine


def test_an_engine_reports_how_busy_it_is() -> None:
    engine, _ = make_engine(num_blocks=16, block_size=4, max_num_seqs=2)
    for i in range(3):
        engine.add_request(EngineRequest(str(i), [i] * 9, SamplingParams(max_tokens=3)))
    before = engine.meter.load()
    assert (before.num_running, before.num_waiting, before.queued_prefill_tokens) == (0, 3, 27)
    assert before.num_blocks == before.num_free_blocks == 16
    engine.step()
    after = engine.meter.load()
    assert (after.num_running, after.num_waiting, after.queued_prefill_tokens) == (2, 1, 9)
    assert (after.num_free_blocks, after.num_steps) == (10, 1)
    assert after.prefill_tokens_per_s == 0  # eighteen tokens are too few to measure
    assert pickle.loads(pickle.dumps(after)) == after


def test_answers_are_pending_then_decode_then_gone() -> None:
    engine, _ = make_engine(num_blocks=32, block_size=4, max_num_seqs=2)
    for i in range(3):
        engine.add_request(EngineRequest(str(i), [i] * 9, SamplingParams(max_tokens=3 + i, n=1)))
    load = engine.meter.load()
    assert (load.num_pending, load.num_pending_tokens, load.num_decoding, load.num_decoding_tokens) == (3, 27, 0, 0)
    engine.step()
    load = engine.meter.load()
    assert (load.num_pending, load.num_pending_tokens, load.num_decoding, load.num_decoding_tokens) == (1, 9, 2, 18)
    engine.step()
    assert engine.meter.load().num_decoding_tokens == 20
    engine.abort("1")
    assert (engine.meter.load().num_decoding, engine.meter.load().num_decoding_tokens) == (1, 10)
    while engine.has_unfinished:
        engine.step()
    load = engine.meter.load()
    assert (load.num_pending, load.num_pending_tokens, load.num_decoding, load.num_decoding_tokens) == (0, 0, 0, 0)


def test_a_preempted_answer_is_pending_again() -> None:
    engine, _ = make_engine(num_blocks=6, block_size=4, max_num_seqs=2)
    for i in range(2):
        engine.add_request(EngineRequest(str(i), [i] * 9, SamplingParams(max_tokens=12)))
    seen = set()
    while engine.has_unfinished:
        engine.step()
        load = engine.meter.load()
        assert load.num_pending + load.num_decoding == len(engine.scheduler.running) + len(engine.scheduler.waiting)
        seen.add((load.num_pending, load.num_decoding))
    assert (1, 1) in seen


def test_a_request_aborted_while_its_step_is_in_flight_does_not_decode() -> None:
    engine, _ = make_engine(num_blocks=32, block_size=4, max_num_seqs=2)
    engine.add_request(EngineRequest("0", [1] * 9, SamplingParams(max_tokens=5)))
    engine.step()
    engine.observers.step_started()
    output = engine.scheduler.schedule()
    engine.observers.step_scheduled(output)
    engine.abort("0")
    engine.observers.step_finished(output, [], StepTimes())
    load = engine.meter.load()
    assert (load.num_pending, load.num_decoding, load.num_decoding_tokens) == (0, 0, 0)

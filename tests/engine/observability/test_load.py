"""The load that an engine reports."""

from __future__ import annotations

import pickle

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
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

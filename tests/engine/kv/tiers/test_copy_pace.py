"""Blocks that are saved are copied a few at a time, as long as something else is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.kv.tiers.copy_pace import CopyPace
from engine.kv.tiers.departures import Departures, Lease
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.kv.tiers.disk_engines import PROMPT, SIZE, disk_of, make, settle, tiers_of
from tests.engine.shadow import run_to_end


def test_the_shortest_of_the_last_steps_counts() -> None:
    pace = CopyPace()
    assert pace.max_bytes() == 64 * 2**20
    pace.step_finished(10.0)
    assert pace.max_bytes() == 64 * 2**20
    pace.step_finished(0.03)
    for _ in range(3):
        assert pace.max_bytes() == int(0.02 * 2e9 * 0.03)
        pace.step_finished(0.1)
    pace.step_finished(0.1)
    assert pace.max_bytes() == int(0.02 * 2e9 * 0.1)


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_engine_that_decodes_copies_one_block_at_a_time(
    is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make(tmp_path)
    lease, sizes = Departures.lease, list[int]()

    def recorded(departures: Departures, *args: Any, **options: Any) -> Lease | None:
        new_lease = lease(departures, *args, **options)
        if new_lease is not None:
            sizes.append(new_lease.num_blocks)
        return new_lease

    monkeypatch.setattr(Departures, "lease", recorded)
    monkeypatch.setattr(CopyPace, "max_bytes", lambda pace: 1)
    if is_busy:
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        engine.add_request(EngineRequest("long", [5, 6, 7], long))
    engine.add_request(EngineRequest("short", PROMPT, SamplingParams(temperature=0, max_tokens=1)))
    while "short" in engine._groups:
        engine.step()
    while sum(sizes) < len(PROMPT) // SIZE:
        if tiers_of(engine).needs_step:
            engine.step()
        else:
            tiers_of(engine).inbox.wait()
    num_saved = len(PROMPT) // SIZE
    assert sizes[:num_saved] == [1] * num_saved if is_busy else sizes == [8, 2], sizes
    run_to_end(engine)
    settle(engine)
    assert disk_of(engine).num_blocks >= num_saved
    engine.close()

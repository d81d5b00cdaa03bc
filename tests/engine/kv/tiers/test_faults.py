"""What goes wrong with a disk, or with shared storage, costs a computation, and nothing else."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.kv.events import AllBlocksCleared, BlockSaved, BlockUnsaved, KVEvent
from engine.kv.tiers import fetching
from engine.kv.tiers.disk import slot_file
from engine.observability import metrics as m
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.kv.tiers.disk_engines import PROMPT, SIZE, Gate, answer, make, settle, storage_of, tiers_of
from tests.engine.observability.test_metrics import RecordingSink
from tests.engine.shadow import ShadowRunner, check_integrity, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=3)
FULL = len(PROMPT) // SIZE * SIZE


@pytest.fixture(params=["disk", "shared"])
def storage(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def runner(tmp_path: Path, storage: str) -> ShadowRunner:
    """The runner of an engine that has left the prompt's ten blocks on the storage."""
    engine, runner = make(tmp_path, None, storage)
    assert answer(engine, runner) == 0
    assert storage_of(engine).num_blocks == 11
    engine.close()
    return runner


def file_of(directory: Path, index: int = 0) -> tuple[Path, int]:
    """Return the file that has the page of a block, and where the page begins."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    if files[0].suffix == ".kv":
        return files[0], 4096 + index * 4096 + 512
    (path,) = (path for path in files if path.name.endswith(f"-{index}"))
    return path, 512


def saved(events: list[KVEvent]) -> set[int]:
    """Return the hashes that a router takes to be on the disk."""
    hashes: set[int] = set()
    for event in events:
        if isinstance(event, BlockSaved):
            hashes.add(event.block_hash)
        elif isinstance(event, BlockUnsaved):
            hashes.remove(event.block_hash)
        elif isinstance(event, AllBlocksCleared):
            hashes.clear()
    return hashes


def test_a_restart_finds_all_blocks_and_reports_them(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    events: list[KVEvent] = []
    sink = RecordingSink()
    engine, again = make(tmp_path, runner, storage, on_kv_events=lambda batch: events.extend(batch.events), sink=sink)
    assert saved(events) == set(storage_of(engine)._indices[0].hashes)
    assert len(saved(events)) == 11
    assert answer(engine, again) == FULL
    assert sink.counters[m.TIER_TOKENS, storage, "in"] == FULL
    assert sink.counters[m.TIER_HITS, storage] == sink.counters[m.TIER_HITS, "host"] == FULL
    assert sink.counters[m.TIER_BYTES, storage, "in"] == FULL * 8
    assert sink.counters[m.TIER_TOKENS, "host", "in"] == FULL
    assert sink.counters[m.TIER_BYTES, "host", "in"] == FULL * 8
    assert sink.gauges[m.TIER_CAPACITY, storage] == storage_of(engine).max_blocks
    assert sink.gauges[m.TIER_CAPACITY, "host"] == 32
    assert sink.gauges[m.TIER_LEASES] == 0
    engine.close()


def test_one_flipped_bit_costs_the_blocks_after_it(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    path, start = file_of(tmp_path, 6)
    with path.open("r+b") as file:
        file.seek(start + 9)
        byte = file.read(1)[0]
        file.seek(start + 9)
        file.write(bytes([byte ^ 4]))
    sink, events = RecordingSink(), list[KVEvent]()
    engine, again = make(tmp_path, runner, storage, sink=sink, on_kv_events=lambda batch: events.extend(batch.events))
    assert storage_of(engine).num_blocks == 11
    assert answer(engine, again) == 6 * SIZE
    assert sink.counters[m.TIER_FAILURES, storage, "checksum"] == 1
    assert storage_of(engine).num_blocks == 11, "it was written again"
    assert saved(events) == set(storage_of(engine)._indices[0].hashes)
    engine.close()


def test_a_file_that_was_cut_keeps_what_is_left(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    path, start = file_of(tmp_path, 4)
    os.truncate(path, start + 3)
    engine, again = make(tmp_path, runner, storage)
    assert storage_of(engine).num_blocks == (5 if storage == "disk" else 10)
    assert answer(engine, again) == 4 * SIZE
    engine.close()


def test_a_file_of_another_model_under_this_models_name_is_not_used(
    tmp_path: Path, runner: ShadowRunner, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "engine.kv.tiers.tiers.model_digest"
    (stale,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(other, lambda config, info: b"another model")
        engine, again = make(tmp_path, runner, storage)
        assert storage_of(engine).num_blocks == 0
        digest = tiers_of(engine).format.digest.hex()
        engine.close()
        if storage == "disk":
            shutil.copy(stale, tmp_path / f"{digest}-0.kv")
        else:
            shutil.copytree(stale, tmp_path / digest, dirs_exist_ok=True)
        engine, again = make(tmp_path, runner, storage)
        assert storage_of(engine).num_blocks == (0 if storage == "disk" else 11)
        assert answer(engine, again) == 0
        engine.close()


@pytest.mark.parametrize("storage", ["disk"], indirect=True)
@pytest.mark.parametrize(("call", "code"), [("pwritev", errno.ENOSPC), ("preadv", errno.EIO), ("pwritev", errno.EIO)])
def test_an_error_of_the_disk_turns_it_off_with_one_warning(
    call: str,
    code: int,
    tmp_path: Path,
    runner: ShadowRunner,
    storage: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, sink = list[KVEvent](), RecordingSink()
    engine, again = make(tmp_path, runner, storage, sink=sink, on_kv_events=lambda batch: events.extend(batch.events))

    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(slot_file.os, call, fail)
    with caplog.at_level(logging.WARNING):
        for start in range(3):
            assert answer(engine, again, PROMPT[start:]) <= FULL
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(code) in caplog.text
    assert not storage_of(engine).is_on
    assert saved(events) == set()
    assert sink.counters[m.TIER_FAILURES, storage, "io"] >= 1
    engine.close()


def test_a_stalled_disk_delays_a_request_no_longer_than_its_deadline(
    tmp_path: Path, runner: ShadowRunner, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, sink = Gate(monkeypatch), RecordingSink()
    monkeypatch.setattr(fetching, "DEFAULT_WAIT_S", 0.02)
    engine, again = make(tmp_path, runner, storage, sink=sink)
    group = engine.add_request(EngineRequest("request", PROMPT, GREEDY))
    assert engine.has_unfinished
    assert not engine.can_step
    assert run_to_end(engine)["request"] == again.answer(PROMPT, 3)
    assert group.sequences[0].num_cached_tokens == 0
    assert sink.counters[m.TIER_FAILURES, storage, "late"] == 1
    assert engine.block_manager.host_pool.pinned, "the disk may still write to these pages"
    gate.is_open.set()
    engine.close()  # waits for the reads
    tiers_of(engine).inbox.run()
    assert all(not pool.pinned for pool in tiers_of(engine).pages.pools)
    check_integrity(engine)


def test_a_disk_that_was_slow_is_not_waited_for(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    engine, again = make(tmp_path, runner, storage)
    tiers = tiers_of(engine)
    tiers.fetching._prefill_rate = lambda: 100.0
    tiers.meter.rate(storage).record(num_tokens=10, num_bytes=80, seconds=1.0)
    assert answer(engine, again) == 0
    tiers.meter.rate(storage).record(num_tokens=100_000, num_bytes=80, seconds=1.0)
    engine.block_manager.prefix_cache.reset()
    assert answer(engine, again) == FULL
    engine.close()


def test_an_aborted_request_waits_no_longer(
    tmp_path: Path, runner: ShadowRunner, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    engine, _ = make(tmp_path, runner, storage)
    for name in ("first", "follower", "other"):
        engine.add_request(EngineRequest(name, PROMPT if name != "other" else PROMPT[:12], GREEDY))
    assert tiers_of(engine).num_waiting == 3
    for name in ("follower", "first", "other"):
        assert engine.abort(name)
        assert not engine.abort(name)
    assert not engine.has_unfinished
    gate.is_open.set()
    engine.close()
    tiers_of(engine).inbox.run()
    assert all(not pool.pinned for pool in tiers_of(engine).pages.pools)
    assert not engine._groups


def test_requests_with_one_prefix_wait_for_one_read(
    tmp_path: Path, runner: ShadowRunner, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    engine, again = make(tmp_path, runner, storage)
    groups = [
        engine.add_request(EngineRequest(str(number), PROMPT + [number], GREEDY))  # noqa: RUF005
        for number in range(4)
    ]
    assert tiers_of(engine).num_waiting == 4
    gate.is_open.set()
    answers = run_to_end(engine)
    assert answers == {str(number): again.answer([*PROMPT, number], 3) for number in range(4)}
    assert [group.sequences[0].num_cached_tokens for group in groups] == [FULL] * 4
    assert gate.num_calls == FULL // SIZE
    settle(engine)
    engine.close()


def test_a_host_pool_without_room_costs_a_computation(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    sink = RecordingSink()
    engine, again = make(tmp_path, runner, storage, num_host_blocks=2, sink=sink)
    pool = engine.block_manager.host_pool
    pages = [pool.reserve(), pool.reserve()]
    group = engine.add_request(EngineRequest("request", PROMPT, GREEDY))
    assert run_to_end(engine)["request"] == again.answer(PROMPT, 3)
    assert group.sequences[0].num_cached_tokens == 0
    assert sink.counters[m.TIER_FAILURES, storage, "full"] == 1
    for page in pages:
        assert page is not None
        pool.unpin(page)
    settle(engine)
    engine.close()


def test_a_prompt_longer_than_host_memory_is_read_in_part(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    engine, again = make(tmp_path, runner, storage, num_host_blocks=8)
    assert answer(engine, again) == 4 * SIZE, "half of the host pool"
    engine.close()


@pytest.mark.parametrize("storage", ["disk"], indirect=True)
def test_a_reset_empties_the_disk(tmp_path: Path, runner: ShadowRunner, storage: str) -> None:
    engine, again = make(tmp_path, runner, storage)
    engine.reset_prefix_cache()
    assert storage_of(engine).num_blocks == 0
    assert answer(engine, again, PROMPT[4:20]) == 0
    engine.close()
    engine, again = make(tmp_path, runner, storage)
    assert storage_of(engine).num_blocks == 4
    assert answer(engine, again) == 0
    engine.close()


def test_nothing_is_read_to_pages_that_a_step_may_still_read_when_the_cache_is_reset(
    tmp_path: Path, runner: ShadowRunner, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read waits for the step in flight, and a reset waits for none."""
    engine, again = make(tmp_path, runner, storage)
    reads: list[object] = []
    monkeypatch.setattr(storage_of(engine), "fetch", lambda wanted, sink: reads.append(sink))
    tiers_of(engine).steps.launched(object())
    engine.add_request(EngineRequest("request", PROMPT, GREEDY))
    engine.reset_prefix_cache()
    assert not reads
    assert run_to_end(engine)["request"] == again.answer(PROMPT, 3)
    engine.close()


def test_a_failed_step_keeps_what_is_on_the_disk(
    tmp_path: Path, runner: ShadowRunner, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[KVEvent] = []
    engine, again = make(tmp_path, runner, storage, on_kv_events=lambda batch: events.extend(batch.events))
    engine.add_request(EngineRequest("request", [5] * 12, GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(ShadowRunner, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.abort("request")
    assert len(saved(events)) == 11
    assert answer(engine, again) == FULL
    engine.close()

"""Engines that share a storage find each other's blocks; its errors, and its limit, cost computations and no more."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.events import KVEvent
from engine.kv.tiers.shared import object_store, shared_tier
from engine.kv.tiers.shared.object_index import ObjectIndex
from engine.kv.tiers.shared.object_name import ObjectName
from engine.kv.tiers.shared.object_store import ObjectStore
from engine.kv.tiers.shared.retirement import StoredObject, retired
from engine.observability import metrics as m
from tests.engine.kv.tiers.disk_engines import PROMPT, SIZE, answer, make, shared_of, tiers_of
from tests.engine.kv.tiers.test_faults import saved
from tests.engine.observability.test_metrics import RecordingSink
from tests.engine.shadow import ShadowRunner, make_engine

FULL = len(PROMPT) // SIZE * SIZE
OTHER = [50 - token for token in range(22)]


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where a shared cache is: a directory, or objects in this process."""
    return str(tmp_path) if request.param == "directory" else f"memory://{uuid4().hex}"


def make_shared(place: Path | str, runner: ShadowRunner | None = None, **options: Any) -> tuple[Engine, ShadowRunner]:
    return make(place, runner, "shared", **options)


def list_now(engine: Engine) -> None:
    """Let an engine list the storage, and wait until it has done so."""
    tier, calls = shared_of(engine), list[None]()
    listed = tier._listed

    def counted(*args: Any) -> None:
        listed(*args)
        calls.append(None)

    tier._listed = counted  # type: ignore[method-assign]
    tier._list()
    while not calls:
        tiers_of(engine).inbox.wait()
    tier._listed = listed  # type: ignore[method-assign]


def paths(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.fixture
def pair(place: str) -> Iterator[tuple[Engine, Engine, ShadowRunner, ShadowRunner, list[KVEvent]]]:
    """Two engines on one storage, and the events of the second one."""
    events: list[KVEvent] = []
    first, runner = make_shared(place)
    second, other = make_shared(place, runner, on_kv_events=lambda batch: events.extend(batch.events))
    yield first, second, runner, other, events
    first.close()
    second.close()


def test_an_engine_finds_what_its_neighbour_has_written_since(
    pair: tuple[Engine, Engine, ShadowRunner, ShadowRunner, list[KVEvent]],
) -> None:
    first, second, runner, other, events = pair
    assert answer(first, runner) == 0
    assert shared_of(second).num_blocks == 0
    list_now(second)
    assert saved(events) == set(shared_of(first)._indices[0].hashes)
    assert len(saved(events)) == 11
    assert answer(second, other) == FULL


def test_an_object_that_has_vanished_costs_the_blocks_after_it(tmp_path: Path) -> None:
    first, runner = make_shared(tmp_path)
    assert answer(first, runner) == 0
    first.close()
    sink, events = RecordingSink(), list[KVEvent]()
    second, other = make_shared(tmp_path, runner, sink=sink, on_kv_events=lambda batch: events.extend(batch.events))
    (path,) = (path for path in paths(tmp_path) if path.name.endswith("-6"))
    path.unlink()
    assert answer(second, other) == 6 * SIZE
    assert sink.counters[m.TIER_FAILURES, "shared", "gone"] == 1
    assert path.exists(), "it was written again"
    assert len(saved(events)) == 11
    second.close()


def test_a_damaged_object_is_written_again(tmp_path: Path) -> None:
    first, runner = make_shared(tmp_path)
    assert answer(first, runner) == 0
    first.close()
    (path,) = (path for path in paths(tmp_path) if path.name.endswith("-6"))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    second, other = make_shared(tmp_path, runner)
    assert answer(second, other) == 6 * SIZE
    second.close()
    assert path.read_bytes()[512:] == good[512:]
    third, again = make_shared(tmp_path, runner)
    assert answer(third, again) == FULL
    third.close()


def test_a_damaged_object_is_deleted_although_no_one_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, runner = make_shared(tmp_path)
    assert answer(first, runner) == 0
    first.close()
    path = next(path for path in paths(tmp_path) if path.name.endswith("-6"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(ObjectStore, "write", lambda *args: None)
    second, other = make_shared(tmp_path, runner)
    assert answer(second, other) == 6 * SIZE
    second.close()
    assert not path.exists()


def test_a_header_of_another_block_under_this_blocks_name_is_not_used(tmp_path: Path) -> None:
    first, runner = make_shared(tmp_path)
    assert answer(first, runner) == 0
    first.close()
    by_index = {int(path.name.rsplit("-", 1)[1]): path for path in paths(tmp_path)}
    by_index[3].write_bytes(by_index[5].read_bytes())
    second, other = make_shared(tmp_path, runner)
    assert answer(second, other) == 3 * SIZE
    second.close()


class PluginError(Exception):
    """An error that no OSError is, as those of botocore."""


@pytest.mark.parametrize(
    ("call", "error"),
    [("cat_file", PluginError("denied")), ("pipe_file", PluginError("denied")), ("pipe_file", OSError(28, "full"))],
)
def test_an_error_turns_the_cache_off_for_a_while(
    call: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_tier, "FIRST_PAUSE_S", 0.0)
    first, runner = make_shared(tmp_path)
    assert answer(first, runner) == 0
    first.close()
    events, sink = list[KVEvent](), RecordingSink()
    engine, again = make_shared(tmp_path, runner, sink=sink, on_kv_events=lambda batch: events.extend(batch.events))
    lists = list[Callable[[], None]]()
    monkeypatch.setattr(shared_of(engine), "_list_later", lambda seconds: lists.append(shared_of(engine)._list))

    def fail(*args: Any, **options: Any) -> None:
        raise error

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(object_store.LocalFileSystem, call, fail)
        for prompt in (PROMPT, OTHER, PROMPT):
            assert answer(engine, again, prompt) <= FULL
        assert not shared_of(engine).is_on
        assert saved(events) == set()
        assert sink.counters[m.TIER_FAILURES, "shared", "io"] >= 1
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert str(error).strip("[]").rsplit("] ", 1)[-1] in caplog.text
        assert len(lists) == 1
    lists.pop()()
    while not shared_of(engine).is_on:
        tiers_of(engine).inbox.wait()
    engine.block_manager.prefix_cache.reset()
    assert answer(engine, again) == FULL
    engine.close()


def test_a_storage_that_cannot_be_listed_leaves_the_engine_running(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        engine, runner = make_engine(
            block_size=SIZE, num_blocks=40, num_host_blocks=32, shared_cache_path=str(tmp_path / "file")
        )
        assert answer(engine, runner) == 0
        while not caplog.records:
            tiers_of(engine).inbox.wait()
    assert "is off for" in caplog.text
    assert not shared_of(engine).is_on
    engine.close()


@pytest.mark.parametrize("url", ["nothing://bucket", "s3://bucket/kv"])
def test_a_protocol_without_a_file_system_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"shared_cache_path='.*' cannot be used: .*"):
        make_engine(num_host_blocks=8, shared_cache_path=url)


@pytest.mark.parametrize("options", [{"num_host_blocks": 0}, {"num_host_blocks": 8, "enable_prefix_caching": False}])
def test_a_shared_cache_needs_a_host_pool_and_the_prefix_cache(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shared_cache_path=.* needs a host pool and the prefix cache"):
        make_engine(shared_cache_path=str(tmp_path), **options)


def test_a_file_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_shared(tmp_path)
    replace, seen = os.replace, list[tuple[str, int]]()

    def recorded(part: str, path: str) -> None:
        assert not Path(path).exists()
        seen.append((part, Path(part).stat().st_size))
        replace(part, path)

    monkeypatch.setattr(object_store.os, "replace", recorded)
    answer(engine, runner)
    assert len(seen) == 11
    assert {size for _, size in seen} == {512 + SIZE * 8}
    assert all(ObjectName.parse(str(Path(part).relative_to(tmp_path))) is None for part, _ in seen)
    engine.close()


def test_what_a_killed_writer_has_left_is_deleted(tmp_path: Path) -> None:
    engine, runner = make_shared(tmp_path)
    answer(engine, runner)
    path = paths(tmp_path)[0]
    old, new, foreign = (Path(f"{path}.{name}.part") for name in ("a", "b", "c"))
    foreign = tmp_path / "notes.part"
    for part in (old, new, foreign):
        part.touch()
    for part in (old, foreign):
        os.utime(part, (1e9, 1e9))
    list_now(engine)
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()
    assert shared_of(engine).num_blocks == 11
    engine.close()


def test_the_oldest_objects_are_deleted_above_the_limit(place: str) -> None:
    limit = 16 * (512 + SIZE * 8)
    engine, runner = make_shared(place, shared_cache_gib=limit / 2**30)
    assert answer(engine, runner) == 0
    assert answer(engine, runner, OTHER) == 0
    assert shared_of(engine).num_blocks == 11 + 6
    list_now(engine)
    assert shared_of(engine).num_blocks == 15
    engine.close()
    second, other = make_shared(place, runner)
    assert answer(second, other, OTHER) == len(OTHER) // SIZE * SIZE
    assert answer(second, other) == 9 * SIZE, "of the older text the end was deleted"
    second.close()


def test_without_a_limit_nothing_is_deleted(tmp_path: Path) -> None:
    engine, runner = make_shared(tmp_path, shared_cache_gib=None)
    answer(engine, runner)
    list_now(engine)
    assert shared_of(engine).num_blocks == 11
    engine.close()


def test_a_storage_that_does_not_know_ages_keeps_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_store, "_TIMES", ())
    engine, runner = make_shared(tmp_path, shared_cache_gib=2 * (512 + SIZE * 8) / 2**30)
    answer(engine, runner)
    with caplog.at_level(logging.WARNING):
        list_now(engine)
        list_now(engine)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert shared_of(engine).num_blocks > 2
    engine.close()


def stored(text: bytes, index: int, written_at: float, kind: int = 0) -> StoredObject:
    def digest(number: int) -> bytes:
        return text * 15 + bytes([number])

    return StoredObject(ObjectName(b"f" * 16, kind, digest(index + 1), digest(index), index, index), 100, written_at)


def test_a_text_that_is_extended_is_kept_as_a_whole() -> None:
    extended = [stored(b"a", 0, 1.0), stored(b"a", 1, 1.0), stored(b"a", 2, 9.0)]
    other = [stored(b"b", 0, 5.0), stored(b"b", 1, 5.0), stored(b"b", 1, 5.0, kind=1)]
    assert retired(extended + other, 600) == []
    assert retired(extended + other, 500) == [other[1], other[2]]
    assert retired(extended + other, 200) == [other[1], other[2], other[0], extended[2], extended[1]]


def test_a_listing_does_not_forget_what_was_written_since_it_began() -> None:
    index, names = ObjectIndex(), [stored(b"a", number, 1.0).name for number in range(4)]

    def write(name: ObjectName) -> None:
        index.begin(name)
        index.commit(name.digest, name.block_hash)
        index.check_integrity()

    write(names[0])
    index.listing_begins()
    write(names[1])
    assert index.listed([names[2]]) == ([2], [0])
    assert sorted(index.hashes) == [1, 2]
    index.listing_begins()
    assert index.drop(names[2].digest) == 2
    assert index.listed([names[2], names[3]]) == ([2, 3], [1])
    index.check_integrity()


def test_names_are_read_as_they_are_written() -> None:
    name = ObjectName(b"f" * 16, 2, b"d" * 16, b"p" * 16, 2**64 - 1, 12)
    assert ObjectName.parse(str(name)) == name
    for other in (f"x{name}", f"{name}.part", str(name).upper(), str(name).replace("/2/", "/x/"), ""):
        assert ObjectName.parse(other) is None


@pytest.mark.parametrize("fails_first", [False, True])
def test_after_a_reset_an_engine_neither_reads_nor_writes(
    fails_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may have changed, and the digest of those that were loaded would name what it writes."""
    engine, runner = make_shared(tmp_path)
    answer(engine, runner)
    if fails_first:
        monkeypatch.setattr(shared_of(engine), "_list_later", lambda seconds: None)
        shared_of(engine)._turn_off(OSError("gone"), shared_of(engine)._epoch)
    shared_of(engine)._list()  # is under way
    engine.reset_prefix_cache()
    assert answer(engine, runner) == 0
    shared_of(engine)._writer.submit(lambda: None).result()
    tiers_of(engine).inbox.run()
    assert not shared_of(engine).is_on
    assert answer(engine, runner, OTHER) == 0
    engine.close()
    second, other = make_shared(tmp_path, runner)
    assert shared_of(second).num_blocks == 11
    assert answer(second, other) == FULL
    second.close()


def test_one_listing_follows_another_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_shared(tmp_path)
    tier, planned = shared_of(engine), list[Callable[[], None]]()
    lists = list[None]()
    monkeypatch.setattr(tiers_of(engine).inbox, "post_at", lambda moment, call: planned.append(call))
    for _ in range(3):
        tier.is_on = True
        tier._turn_off(OSError("gone"), tier._epoch)
        tier._listed(shared_tier._Listing(), tier._epoch - 1)
        tier._list_later(1.0)
    monkeypatch.setattr(tier, "_list", lambda: lists.append(None))
    for call in planned:
        call()
    assert len(planned) == 6
    assert len(lists) == 1
    engine.close()


def test_errors_of_file_systems_become_oserrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_shared(tmp_path)
    store = shared_of(engine)._store

    def fail(*args: Any, **options: Any) -> None:
        raise PluginError("denied")

    monkeypatch.setattr(object_store.LocalFileSystem, "find", fail)
    with pytest.raises(OSError, match="PluginError: denied"):
        ObjectStore.list(store, all_formats=True)
    engine.close()

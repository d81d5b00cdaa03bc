"""A batch is interrupted at any operation on the disk, or by a second runner: each line has one result in the end."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.batch.batch_run import BatchRun, Workplace
from deployments.batch.batch_store import BatchStore, State
from deployments.batch.disk import Disk
from deployments.batch.file_store import FileStore
from deployments.batch.in_process import Answer
from deployments.batch.journal import Journal, JournalLostError, Record, Tokens
from deployments.batch.line_slots import LineSlots
from deployments.batch.options import BatchOptions
from tests.deployments.batch.conftest import COMPLETIONS, line
from tests.deployments.batch.faulty_disk import DiskError, FaultyDisk, InterruptedDisk
from tests.waiting import HANG_S, until_in_loop

NUM_LINES = 7
CONTENT = "\n".join([*(line(f"r{number}", prompt=f"p{number}") for number in range(NUM_LINES)), "{broken"])


class Engines:
    """Answers a line with its own prompt; counts the calls."""

    def __init__(self, pause: asyncio.Event | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self._pause = pause

    async def __call__(self, path: str, body: bytes, request_id: str, client: str) -> Answer:
        prompt = json.loads(body)["prompt"]
        self.calls[prompt] += 1
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        if self._pause is not None and prompt != "p0":
            await self._pause.wait()
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        content = {"model": "m", "text": prompt, "usage": usage}
        return Answer(400 if prompt == "p3" else 200, request_id, json.dumps(content).encode())


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def workplace(directory: Path, executor: Executor, disk: FaultyDisk, engines: Engines) -> Workplace:
    options = BatchOptions(directory)
    batches = BatchStore(disk, options)
    files = FileStore(disk, options, batches.is_output)
    return Workplace(disk, files, batches, options, engines, LineSlots(lambda: 3), executor)


def new_batch(directory: Path, executor: Executor) -> str:
    """Upload a file and create a batch; returns its id."""
    work = workplace(directory, executor, FaultyDisk(), Engines())
    upload = work.files.begin()
    upload.write(CONTENT.encode())
    file = work.files.keep(upload, "in.jsonl", "batch")
    state = work.batches.create(work.files.path(file), file.id, COMPLETIONS, 86_400, completion_window="24h")
    return state.batch.id


def written(directory: Path) -> bytes:
    """Return what the first runner of the only batch has written."""
    return b"".join(path.read_bytes() for path in directory.glob("batches/*/results-1.jsonl"))


async def run(work: Workplace, batch_id: str, status: str | None = None) -> None:
    state = work.batches.get(batch_id)
    assert state is not None
    if state.end is not None:
        return
    batch = BatchRun(work, state, 1)
    if status is not None:
        batch.stop(status)
    await batch.run()


def results(work: Workplace, batch_id: str) -> tuple[State, dict[str, list[Any]]]:
    """Return an ended batch, and the lines of each of its files."""
    state = work.batches.get(batch_id)
    assert state is not None
    assert state.end is not None
    lines = {}
    for name in ("output_file_id", "error_file_id"):
        file = work.files.get(state.end[name]) if state.end[name] else None
        text = "" if file is None else work.files.path(file).read_text()
        lines[name] = [json.loads(part) for part in text.splitlines()]
    return state, lines


def check(work: Workplace, batch_id: str) -> None:
    """Fail unless the batch has what it has without any fault."""
    state, lines = results(work, batch_id)
    directory = work.batches.path(batch_id)
    assert (state.status, state.end is not None and state.end["request_counts"]) == (
        "completed",
        {"total": NUM_LINES + 1, "completed": NUM_LINES - 1, "failed": 2},
    )
    assert state.end is not None
    assert state.end["usage"]["total_tokens"] == 3 * (NUM_LINES - 1)
    answered = [(item["custom_id"], item["response"]["body"]["text"]) for item in lines["output_file_id"]]
    assert answered == [(f"r{number}", f"p{number}") for number in range(NUM_LINES) if number != 3]
    errors = [item["custom_id"] for item in lines["error_file_id"]]
    assert errors == ["r3", None]
    assert len(work.files.all()) == 3
    leftovers = [path for name in ("results-*", "progress-*", "input.jsonl") for path in directory.glob(name)]
    assert not leftovers


async def interrupt(directory: Path, executor: Executor, fails_at: int, **fault: bool) -> bool:
    """Run a batch with a fault and then without; returns whether the fault came."""
    batch_id = new_batch(directory, executor)
    faulty = FaultyDisk(fails_at, **fault)
    engines = Engines()
    with_fault = workplace(directory, executor, faulty, engines)
    with suppress(DiskError):
        await run(with_fault, batch_id)
    has_failed = faulty.num_operations > fails_at
    healthy = workplace(directory, executor, FaultyDisk(), engines)
    if not fault["is_dead"] and has_failed:
        healthy = with_fault  # it goes on by itself
    await run(healthy, batch_id)
    healthy.batches.sweep()
    check(healthy, batch_id)
    assert max(engines.calls.values()) <= 2
    return has_failed


@pytest.mark.parametrize(
    "fault", [{"is_dead": dead, "is_done": done} for dead in (True, False) for done in (True, False)]
)
async def test_a_fault_at_any_operation(tmp_path: Path, executor: Executor, fault: dict[str, bool]) -> None:
    number = 0
    while await interrupt(tmp_path / str(number), executor, number, **fault):
        number += 1
    assert number > 25


async def test_what_has_a_durable_result_is_not_sent_again(tmp_path: Path, executor: Executor) -> None:
    batch_id, pause = new_batch(tmp_path, executor), asyncio.Event()
    first = Engines(pause)
    task = asyncio.create_task(run(workplace(tmp_path, executor, FaultyDisk(), first), batch_id))
    await until_in_loop(lambda: b"p0" in written(tmp_path) and first.calls["p2"] > 0)
    task.cancel()
    await asyncio.wait([task])
    second = Engines()
    work = workplace(tmp_path, executor, FaultyDisk(), second)
    await run(work, batch_id)
    assert "p0" not in second.calls
    assert len(second.calls) == NUM_LINES - 1
    check(work, batch_id)


@pytest.mark.parametrize("seed", range(8))
async def test_a_runner_that_was_taken_for_dead_changes_nothing(tmp_path: Path, executor: Executor, seed: int) -> None:
    """It goes on, at any moment of its successor's run, with results and files of its own."""
    batch_id, pause = new_batch(tmp_path, executor), asyncio.Event()
    stalled = workplace(tmp_path, executor, FaultyDisk(), Engines(pause))
    task = asyncio.create_task(run(stalled, batch_id))
    await until_in_loop(lambda: b"p0" in written(tmp_path))
    successor = workplace(tmp_path, executor, FaultyDisk(), Engines())
    other = asyncio.create_task(run(successor, batch_id))
    for _ in range(seed * 6):
        await asyncio.sleep(0.0005)
    pause.set()
    outcomes = await asyncio.gather(task, other, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), JournalLostError}
    await run(successor, batch_id)
    check(successor, batch_id)


async def overtaken(directory: Path, executor: Executor, number: int) -> bool:
    """Run a batch; before the operation ``number`` another runner claims the batch and ends it.

    Returns:
        Whether the first runner has got so far.
    """
    batch_id, loop = new_batch(directory, executor), asyncio.get_running_loop()
    other = workplace(directory, executor, FaultyDisk(), Engines())

    def overtake() -> None:
        asyncio.run_coroutine_threadsafe(run(other, batch_id), loop).result(HANG_S)

    disk = InterruptedDisk(number, overtake)
    with suppress(JournalLostError):
        await run(workplace(directory, executor, disk, Engines()), batch_id)
    check(other, batch_id)
    check_files(other)
    return disk.num_operations > number


async def caught_up(directory: Path, executor: Executor, number: int) -> bool:
    """Run a batch that an earlier runner has begun; before the operation ``number`` that one goes on to its end.

    Returns:
        Whether the later runner has got so far.
    """
    batch_id, pause, loop = new_batch(directory, executor), asyncio.Event(), asyncio.get_running_loop()
    earlier = asyncio.create_task(run(workplace(directory, executor, FaultyDisk(), Engines(pause)), batch_id))
    await until_in_loop(lambda: b"p0" in written(directory))
    has_ended = threading.Event()
    earlier.add_done_callback(lambda _: has_ended.set())

    def catch_up() -> None:
        loop.call_soon_threadsafe(pause.set)
        assert has_ended.wait(HANG_S)

    disk = InterruptedDisk(number, catch_up)
    work = workplace(directory, executor, disk, Engines())
    with suppress(JournalLostError):
        await run(work, batch_id)
    pause.set()
    with suppress(JournalLostError):
        await earlier
    check(work, batch_id)
    check_files(work)
    return disk.num_operations > number


def check_files(work: Workplace) -> None:
    """Fail unless the only files are the input and the two outputs."""
    assert len(list(work.files.directory.iterdir())) == 2 * 3


@pytest.mark.parametrize("race", [overtaken, caught_up])
async def test_two_runners_leave_what_one_leaves(
    tmp_path: Path, executor: Executor, race: Callable[[Path, Executor, int], Awaitable[bool]]
) -> None:
    """One of them ends the batch between any two operations of the other one."""
    number = 0
    while await race(tmp_path / str(number), executor, number):
        number += 1
    assert number > 25


async def stopped(directory: Path, executor: Executor, number: int) -> bool:
    """Cancel a run in its operation ``number``; returns whether it has got so far."""
    batch_id, loop = new_batch(directory, executor), asyncio.get_running_loop()
    ended_early = False

    def cancel() -> None:
        nonlocal ended_early
        loop.call_soon_threadsafe(task.cancel)
        for _ in range(20):  # turns of the event loop, in which a run that did not wait would end
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(HANG_S)
        ended_early = task.done()

    disk = InterruptedDisk(number, cancel)
    task = asyncio.create_task(run(workplace(directory, executor, disk, Engines()), batch_id))
    await asyncio.wait([task])
    assert not ended_early
    successor = workplace(directory, executor, FaultyDisk(), Engines())
    await run(successor, batch_id)
    check(successor, batch_id)
    check_files(successor)
    return disk.num_operations > number


async def test_a_run_that_is_cancelled_ends_after_its_last_operation(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals: list[Journal] = []

    class CountedJournal(Journal):
        def __init__(self, disk: Disk, directory: Path, lease: int) -> None:
            super().__init__(disk, directory, lease)
            journals.append(self)

        def close(self) -> None:
            super().close()
            journals.remove(self)

    monkeypatch.setattr("deployments.batch.batch_run.Journal", CountedJournal)
    number = 0
    while await stopped(tmp_path / str(number), executor, number):
        number += 1
        assert not journals
    assert number > 25


async def test_the_first_end_of_a_batch_stays(tmp_path: Path, executor: Executor) -> None:
    batch_id = new_batch(tmp_path, executor)
    work = workplace(tmp_path, executor, FaultyDisk(), Engines())
    await run(work, batch_id)
    first = work.batches.get(batch_id)
    assert not work.batches.end(batch_id, {"status": "cancelled", "output_file_id": None})
    assert work.batches.get(batch_id) == first
    check(work, batch_id)


async def test_an_expired_batch_keeps_what_it_has(tmp_path: Path, executor: Executor) -> None:
    batch_id, pause = new_batch(tmp_path, executor), asyncio.Event()
    work = workplace(tmp_path, executor, FaultyDisk(), Engines(pause))
    state = work.batches.get(batch_id)
    assert state is not None
    batch = BatchRun(work, state, 1)
    task = asyncio.create_task(batch.run())
    await until_in_loop(lambda: b"p0" in written(tmp_path))
    batch.stop("expired")
    await task
    state, lines = results(work, batch_id)
    assert state.status == "expired"
    assert [item["custom_id"] for item in lines["output_file_id"]] == ["r0"]
    errors = [(item["custom_id"], item["error"]["code"]) for item in lines["error_file_id"]]
    assert errors == [*((f"r{number}", "batch_expired") for number in range(1, NUM_LINES)), (None, "invalid_json_line")]


RECORDS = st.builds(
    Record,
    st.integers(0, 2**40),
    st.booleans(),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])).map(str.encode),
    st.builds(Tokens, *[st.integers(0, 2**40)] * 4),
)


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert Record.decoded(record.encoded()) == record


@settings(max_examples=60)
@given(st.lists(RECORDS, min_size=1, max_size=6, unique_by=lambda record: record.index), st.data())
def test_a_segment_that_is_cut_or_damaged_counts_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("batch")
    first = Journal(FaultyDisk(), directory, 1)
    first.append(records)
    first.close()
    path = directory / "results-1.jsonl"
    content = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:index]
    else:
        content[index] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    ends = [sum(len(record.encoded()) for record in records[: number + 1]) for number in range(len(records))]
    num_whole = sum(end <= index for end in ends)
    second = Journal(FaultyDisk(), directory, 2)
    assert len(second) == num_whole
    second.append(records)  # those with a result keep it
    assert len(second) == len(records)
    texts = [*second.texts(is_error=False), *second.texts(is_error=True)]
    assert Counter(texts) == Counter(record.text for record in records)
    second.close()
    # The first runner was only taken for dead, and goes on with other results. Those that count already stay.
    late = [replace(record, text=record.text + b" late") for record in records[num_whole:]]
    path.write_bytes(b"".join(record.encoded() for record in [*records[:num_whole], *late]))
    third = Journal(FaultyDisk(), directory, 3)
    assert Counter([*third.texts(is_error=False), *third.texts(is_error=True)]) == Counter(texts)
    third.close()

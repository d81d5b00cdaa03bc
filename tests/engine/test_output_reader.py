"""AsyncEngine with readers in the step thread."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.engine.async_streams import Gate
from tests.engine.shadow import ShadowRunner, make_engine
from tests.waiting import until, until_in_loop


@dataclass(eq=False)
class Recording:
    """A reader that keeps what it gets."""

    calls: list[list[int]] = field(default_factory=list)  # the tags of each ``publish``
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, object] = field(default_factory=dict)
    threads: set[str] = field(default_factory=set)

    def publish(self, tags: list[int], token_ids: list[int], others: list[tuple[int, EngineOutput]]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append([*tags, *(tag for tag, _ in others)])
        for tag, token_id in zip(tags, token_ids, strict=True):
            assert tag not in self.ends
            self.tokens[tag].append(token_id)
        for tag, output in others:
            assert tag not in self.ends
            self.tokens[tag] += output.token_ids
            if output.is_last:
                self.ends[tag] = output.finish_reason

    def fail(self, tag: int, error: Exception) -> None:
        assert tag not in self.ends
        self.ends[tag] = error

    def end(self, tag: int) -> None:
        assert tag not in self.ends
        self.ends[tag] = "aborted"

    def wait(self, count: int) -> None:
        """Wait until so many requests have ended."""
        until(lambda: len(self.ends) >= count, f"{count} requests have ended", pause_s=0.002, details=lambda: self.ends)


Running = tuple[AsyncEngine, Engine, ShadowRunner]


@pytest.fixture
def running() -> Iterator[Running]:
    inner, runner = make_engine(num_blocks=64, block_size=4)
    engine = AsyncEngine(inner)
    yield engine, inner, runner
    engine._inbox.put(None)
    engine._thread.join()


def request(number: int, max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(f"r{number}", [number, 1, 2], SamplingParams(max_tokens=max_tokens))


def test_each_reader_is_called_once_a_step_with_its_own_requests(running: Running) -> None:
    engine, _, runner = running
    gate = Gate(runner)
    first, second = Recording(), Recording()
    engine.submit(request(50, 1), first, 50)
    engine.submit(request(51, 2), first, 51)
    until(gate.is_held.is_set, "the second step has begun")  # it is held until all the others are submitted
    for number in range(8):
        engine.submit(request(number), (first, second)[number % 2], number)
    gate.opened.set()
    first.wait(6)
    second.wait(4)
    for reader, parity in ((first, 0), (second, 1)):
        for number in range(parity, 8, 2):
            assert reader.tokens[number] == runner.answer([number, 1, 2], 6)
            assert reader.ends[number] == "length"
        assert reader.threads == {"engine-step-loop"}
    assert second.calls == [[1, 3, 5, 7]] * 6
    assert not len(engine._readers)


def test_a_reader_that_leaves_takes_only_its_own_requests_along(running: Running) -> None:
    engine, inner, runner = running
    gate = Gate(runner)
    leaving, staying = Recording(), Recording()
    for number in range(6):
        engine.submit(request(number, 40), (leaving, staying)[number % 2], number)
    engine.abort("r5")
    engine.abort("unknown")
    engine.remove_reader(leaving)
    gate.opened.set()
    leaving.wait(3)
    staying.wait(3)
    assert leaving.ends == dict.fromkeys((0, 2, 4), "aborted")
    assert staying.ends == {1: "length", 3: "length", 5: "aborted"}
    assert staying.tokens[1] == runner.answer([1, 1, 2], 40)
    assert inner.block_manager.num_free_blocks == 64


def test_a_reader_that_raises_loses_its_own_requests_only(running: Running) -> None:
    class Broken(Recording):
        def publish(self, tags: list[int], token_ids: list[int], others: list[tuple[int, EngineOutput]]) -> None:
            raise ValueError("a bug")

    engine, inner, runner = running
    broken, whole = Broken(), Recording()
    engine.submit(request(1, 30), broken, 1)
    engine.submit(request(2, 30), whole, 2)
    broken.wait(1)
    whole.wait(1)
    assert broken.ends == {1: "aborted"}
    assert whole.tokens[2] == runner.answer([2, 1, 2], 30)
    assert inner.block_manager.num_free_blocks == 64


async def test_every_request_fails_when_the_step_loop_ends_those_in_the_inbox_included() -> None:
    inner, runner = make_engine()
    gate, reader = Gate(runner), Recording()
    engine = AsyncEngine(inner)
    engine.submit(request(1, 100), reader, 1)
    await until_in_loop(gate.is_held.is_set, "the second step has begun")
    engine._inbox.put(None)
    engine.submit(request(2), reader, 2)  # after the command that ends the loop
    gate.opened.set()
    reader.wait(2)
    assert all(isinstance(error, EngineDeadError) for error in reader.ends.values())
    engine._thread.join()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.submit(request(3), reader, 3)
    assert not len(engine._readers)

"""RemoteRanks: which error ends an engine when several ranks fail. The ranks are processes that do nothing."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineDeadError, ModelLoadError, PagodaError
from engine.worker.ranks import remote_ranks
from engine.worker.ranks.one_host import OneHost
from engine.worker.ranks.rank_hosts import Rank
from engine.worker.ranks.remote_ranks import RankFailure, RemoteRanks
from tests.waiting import HANG_S, until

COLLECTIVE = RankFailure("RuntimeError: Connection closed by peer", None, "a traceback")


class IdleHosts:
    """Ranks whose ends of the connections the test has, by number."""

    own_address = rendezvous = ""

    def __init__(self) -> None:
        self.ends: dict[int, Connection] = {}

    def start(self, size: int) -> list[Rank]:
        return [self._start(number) for number in range(1, size)]

    def _start(self, number: int) -> Rank:
        ours, theirs = socket.socketpair()
        self.ends[number] = Connection(theirs.detach())
        self.ends[number].send((None, None))  # it has started
        return Rank(number, subprocess.Popen(["sleep", str(10 * HANG_S)]), Connection(ours.detach()))

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


class IdleRanks(RemoteRanks):
    """Ranks that do nothing."""

    def __init__(self, size: int) -> None:
        config: Any = SimpleNamespace(tensor_parallel_size=size)
        hosts = IdleHosts()
        self.ends = hosts.ends
        super().__init__(config, hosts, lambda: None)

    def report(self, number: int, failure: RankFailure) -> None:
        """Send the error of a rank, and wait until the watcher has it."""
        self.ends[number].send((None, failure))
        ours = self._ranks[number - 1].connection
        until(lambda: not ours.poll(), "the report is read", pause_s=0.001)

    def cause(self) -> str:
        """Return the error that ends the engine."""
        until(self._failed.is_set, "the ranks have failed", pause_s=0.001)
        with pytest.raises(PagodaError) as caught:
            self.check_health()
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], IdleRanks]]:
    monkeypatch.setattr(remote_ranks, "_DEATH_SECONDS", HANG_S)
    started: list[IdleRanks] = []

    def start(size: int) -> IdleRanks:
        started.append(IdleRanks(size))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def test_hosts_are_closed_if_a_rank_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that have been started end, and the private directory of the engine is removed."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(popen(["sleep", str(10 * HANG_S)]))
        return started[-1]

    popen = subprocess.Popen
    hosts, config = OneHost(), EngineConfig(model="m", tensor_parallel_size=3)
    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(EngineDeadError, match=r"rank 2 of 3 did not start \(Resource .*\); raise the limits"):
        RemoteRanks(config, hosts, lambda: None)
    assert started[0].wait(HANG_S) == -9
    assert not Path(hosts.rendezvous).parent.exists()


def test_a_death_is_the_cause_of_an_error_that_is_reported_before(start: Callable[[int], IdleRanks]) -> None:
    ranks = start(4)
    ranks.report(1, COLLECTIVE)
    ranks.report(3, COLLECTIVE)
    assert not ranks._failed.is_set()
    ranks._ranks[1].process.kill()
    ranks.ends[2].close()
    assert "rank 2 of 4 was killed by SIGKILL" in ranks.cause()


def test_a_process_may_end_after_its_connection(start: Callable[[int], IdleRanks]) -> None:
    ranks = start(2)
    ranks.ends[1].close()
    ranks._ranks[0].process.terminate()
    assert "rank 1 of 2 was killed by signal 15" in ranks.cause()


def test_a_connection_that_ends_without_its_process(
    start: Callable[[int], IdleRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_ranks, "_DEATH_SECONDS", 0.0)
    ranks = start(2)
    ranks.ends[1].close()
    assert "rank 1 of 2 closed its connection" in ranks.cause()


def test_an_error_that_explains_itself_waits_for_no_death(start: Callable[[int], IdleRanks]) -> None:
    ranks = start(3)
    ranks.report(2, RankFailure("", ModelLoadError("a tensor is missing"), "a traceback"))
    assert ranks.cause() == "ModelLoadError: a tensor is missing"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_have_all_reported_an_error_are_alive(start: Callable[[int], IdleRanks], size: int) -> None:
    ranks = start(size)
    for number in range(1, size):
        ranks.report(number, RankFailure(f"ValueError: {number}", None, "a traceback"))
    assert ranks.cause() == f"{EngineDeadError.__name__}: tensor-parallel rank 1 of {size} failed: ValueError: 1"


def test_a_close_ends_the_wait_for_a_death(start: Callable[[int], IdleRanks]) -> None:
    ranks = start(3)
    ranks.report(1, COLLECTIVE)
    ranks.ends[2].close()  # as the end of the killed process does
    ranks.close()
    assert not ranks._watcher.is_alive()

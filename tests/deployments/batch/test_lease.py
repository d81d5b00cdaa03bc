"""One ingress at a time holds the lease, whatever the clocks say; another takes it after a death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.batch.disk import Disk
from deployments.batch.lease import Lease
from tests.deployments.batch.faulty_disk import FaultyDisk
from tests.documents import ROOT


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def lease(directory: Path, clock: Clock, name: str = "a") -> Lease:
    return Lease(FaultyDisk(), directory, name, takeover_s=10, clock=clock)


def test_the_first_one_keeps_it_while_it_beats(tmp_path: Path) -> None:
    clock, other_clock = Clock(), Clock(1e6)
    first, second = lease(tmp_path, clock), lease(tmp_path, other_clock)
    assert first.poll()
    for _ in range(30):
        assert not second.poll()
        other_clock.now += 9
        assert first.poll()
    assert (first.number, second.number) == (1, None)


def test_another_takes_it_after_a_death_and_the_dead_one_learns_that(tmp_path: Path) -> None:
    clock = Clock()
    first, second = lease(tmp_path, clock), lease(tmp_path, clock)
    assert first.poll()
    assert not second.poll()
    clock.now += 9.9
    assert not second.poll()
    clock.now += 0.1
    assert second.poll()
    assert not first.poll()
    assert (first.number, second.number) == (None, 2)
    clock.now += 9
    assert second.poll()
    assert not first.poll()


def test_a_released_lease_is_taken_at_once(tmp_path: Path) -> None:
    first, second = lease(tmp_path, Clock()), lease(tmp_path, Clock())
    assert first.poll()
    first.release()
    assert second.poll()
    assert not first.poll()
    second.release()
    second.release()
    assert first.poll()


TAKES_IT = """
import os, sys
from pathlib import Path
from deployments.batch.disk import Disk
from deployments.batch.lease import Lease
lease = Lease(Disk(), Path(sys.argv[1]), "other")
assert lease.poll()
print(lease.number, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not say whether a process is the same one")
def test_the_lease_of_a_process_that_has_ended_here_is_taken_at_once(tmp_path: Path) -> None:
    clock = Clock()
    second = lease(tmp_path, clock)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TAKES_IT, str(tmp_path)], cwd=ROOT, stdin=pipe, stdout=pipe) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"1\n"
        assert not second.poll()
        taken = json.loads((tmp_path / "lease-1").read_text())
        first.kill()
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert second.poll()
    for other in ({"boot": "another"}, {"namespace": "another"}):
        third = lease(tmp_path / next(iter(other)), clock)
        (tmp_path / next(iter(other))).mkdir()
        assert Disk().create(
            tmp_path / next(iter(other)) / "lease-1", json.dumps({"process": taken["process"] | other}).encode()
        )
        assert not third.poll()
        clock.now += 10
        assert third.poll()


def test_one_that_dies_before_its_first_beat_is_succeeded(tmp_path: Path) -> None:
    clock = Clock()
    assert Disk().create(tmp_path / "lease-7", b"{}")
    second = lease(tmp_path, clock)
    assert not second.poll()
    clock.now += 10
    assert second.poll()
    assert second.number == 8
    assert not (tmp_path / "lease-7").exists()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, 5.0, 10.0])), max_size=60))
def test_numbers_grow_and_belong_to_one(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, float]]
) -> None:
    directory = tmp_path_factory.mktemp("leases")
    clocks = [Clock(1000.0 * number) for number in range(3)]
    leases = [lease(directory, clock, str(number)) for number, clock in enumerate(clocks)]
    owner_of: dict[int, int] = {}
    for index, seconds in steps:
        clocks[index].now += seconds
        if leases[index].poll():
            number = leases[index].number
            assert number is not None
            assert owner_of.setdefault(number, index) == index
            assert number == max(owner_of)  # who has just polled holds the highest

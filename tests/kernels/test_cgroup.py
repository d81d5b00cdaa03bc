"""The CPUs and the memory that control groups of both versions, and their ancestors, leave to a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels import cgroup
from kernels.cgroup import NO_LIMIT, available_cpus, available_memory

UNLIMITED = str(2**63 - 4096)  # of version 1
V1 = "5:cpu,cpuacct:{0}\n4:memory:{0}\n1:name=systemd:/init\n0::/\n"
V2 = "0::{0}\n"


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_affinity", lambda: 16)


def _cpus(tmp_path: Path, membership: str) -> int:
    (tmp_path / "cgroup").write_text(membership)
    return available_cpus(tmp_path / "fs", tmp_path / "cgroup")


def _memory(tmp_path: Path, membership: str) -> int:
    (tmp_path / "cgroup").write_text(membership)
    return available_memory(tmp_path / "fs", tmp_path / "cgroup")


def _write(directory: Path, **files: str) -> None:
    """Write files of a group; ``__`` in a name stands for a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def _limit_v1(
    directory: Path, limit: int | str, used: int, stat: str = "inactive_file 7\ntotal_inactive_file 0"
) -> None:
    _write(directory, memory__limit_in_bytes=str(limit), memory__usage_in_bytes=str(used), memory__stat=stat)


def _limit_v2(directory: Path, limit: int | str, used: int, stat: str = "anon 1\ninactive_file 0") -> None:
    _write(directory, memory__max=str(limit), memory__current=str(used), memory__stat=stat)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 16), ("200000 100000", 2), ("50000 100000", 1), ("250000 100000", 2), ("9900000 100000", 16)],
)
def test_a_quota_of_version_2(tmp_path: Path, quota: str, expected: int) -> None:
    _write(tmp_path / "fs", cpu__max=quota)
    assert _cpus(tmp_path, V2.format("/")) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("400000", 4), ("50000", 1), ("0", 16)])
@pytest.mark.parametrize("name", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_version_1(tmp_path: Path, name: str, quota: str, expected: int) -> None:
    _write(tmp_path / "fs" / name, cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert _cpus(tmp_path, V1.format("/")) == expected


@pytest.mark.parametrize("limited", ["", "pods", "pods/one", "pods/one/c"])
def test_the_lowest_quota_of_a_group_and_its_ancestors_counts(tmp_path: Path, limited: str) -> None:
    for group in ("", "pods", "pods/one", "pods/one/c"):
        low = group == limited
        _write(tmp_path / "fs" / group, cpu__max="300000 100000" if low else "max 100000")
        old = tmp_path / "fs" / "cpu" / group
        _write(old, cpu__cfs_quota_us="200000" if low else "500000", cpu__cfs_period_us="100000")
    _write(tmp_path / "fs" / "pods" / "other", cpu__max="100000 100000")
    assert _cpus(tmp_path, V2.format("/pods/one/c")) == (2 if limited == "" else 3)  # the root of version 1 counts
    assert _cpus(tmp_path, V1.format("/pods/one/c")) == 2


def test_the_name_of_a_group_may_have_a_colon(tmp_path: Path) -> None:
    _write(tmp_path / "fs" / "pods" / "a:b", cpu__max="300000 100000")
    assert _cpus(tmp_path, V2.format("/pods/a:b")) == 3


@pytest.mark.parametrize("path", ["/docker/1f", "/../other", "/"])
@pytest.mark.parametrize("membership", [V1, V2])
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, membership: str, path: str) -> None:
    files = tmp_path / "fs"
    _write(tmp_path / "other", cpu__max="100000 100000")
    if membership == V2:
        _write(files, cpu__max="300000 100000")
        _limit_v2(files, 1000, 400)
    else:
        _write(files / "cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
        _limit_v1(files / "memory", 1000, 400)
    assert _cpus(tmp_path, membership.format(path)) == 3
    assert _memory(tmp_path, membership.format(path)) == 600


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "none"
    assert available_cpus(nowhere, nowhere) == 16
    assert available_memory(nowhere, nowhere) == NO_LIMIT
    monkeypatch.undo()
    if hasattr(os, "sched_getaffinity"):
        assert available_cpus(nowhere, nowhere) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("limit", "expected"), [(1000, 450), (600, 50), (100, 0), ("max", NO_LIMIT)])
def test_a_memory_limit_of_version_2(tmp_path: Path, limit: int | str, expected: int) -> None:
    _limit_v2(tmp_path / "fs" / "a", limit, 700, "anon 500\ninactive_file 150")
    assert _memory(tmp_path, V2.format("/a")) == expected


@pytest.mark.parametrize(("high", "expected"), [("max", 450), (900, 350), (2000, 450)])
def test_what_slows_a_group_of_version_2_down_is_a_limit_too(tmp_path: Path, high: int | str, expected: int) -> None:
    _limit_v2(tmp_path / "fs" / "a", 1000, 700, "anon 500\ninactive_file 150")
    _write(tmp_path / "fs" / "a", memory__high=str(high))
    assert _memory(tmp_path, V2.format("/a")) == expected
    _write(tmp_path / "fs" / "a", memory__max="max")
    assert _memory(tmp_path, V2.format("/a")) == (NO_LIMIT if high == "max" else int(high) - 550)


@pytest.mark.parametrize(("limit", "expected"), [(1000, 450), (600, 50), (100, 0)])
def test_a_memory_limit_of_version_1(tmp_path: Path, limit: int, expected: int) -> None:
    _limit_v1(tmp_path / "fs" / "memory", UNLIMITED, 10**9)
    _limit_v1(tmp_path / "fs" / "memory" / "a", limit, 700, "inactive_file 1\ntotal_inactive_file 150")
    assert _memory(tmp_path, V1.format("/a")) == expected
    _limit_v1(tmp_path / "fs" / "memory" / "a", UNLIMITED, 700)
    assert _memory(tmp_path, V1.format("/a")) > 2**62


def test_memory_limits_of_ancestors_count(tmp_path: Path) -> None:
    new, old = tmp_path / "fs", tmp_path / "fs" / "memory"
    for group, limit in (("pods/one/c", 5000), ("pods/one", 3000), ("pods", 9000)):
        _limit_v2(new / group, limit, 2500)
    assert _memory(tmp_path, V2.format("/pods/one/c")) == 500
    for group, limit in (("pods/one/c", 5000), ("pods/one", 2900), ("pods", 9000)):
        _limit_v1(old / group, limit, 2500)
    assert _memory(tmp_path, V1.format("/pods/one/c")) == 400


def test_no_other_module_counts_cpus() -> None:
    """It would not know of a quota."""
    root = Path(__file__).parents[2]
    files = [
        file for room in ("kernels", "engine", "deployments", "benchmarks") for file in (root / room).rglob("*.py")
    ]
    assert [file.name for file in files if "cpu_count(" in file.read_text()] == ["cgroup.py"]


def test_a_limit_of_an_ancestor_that_a_container_cannot_see(tmp_path: Path) -> None:
    _limit_v1(tmp_path / "fs" / "memory", UNLIMITED, 300, "hierarchical_memory_limit 1000\ntotal_inactive_file 50")
    assert _memory(tmp_path, V1.format("/docker/1f")) == 750

"""The CPUs and the memory that this process may use: its affinity and the limits of its control groups (cgroups).

Containers, pods and systemd's units limit their processes so, while the operating system reports the whole machine to
them. Both versions of control groups are read, and the limits of each group's ancestors count too. A container may see
its own group as the root, whatever path the kernel reports: groups that are not there are skipped.

Knows files of the kernel only: no tensors, and no other module of ours.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["NO_LIMIT", "available_cpus", "available_memory", "machine_cpus"]

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")  # lines such as `0::/user.slice` (version 2) or `4:cpu,cpuacct:/docker/1f`
NO_LIMIT = 2**63

# The files of the limits and of the use, and the entry of memory.stat that counts inactive page cache with descendants.
_MEMORY_FILES = (
    # Version 2. Processes that use more than memory.high are slowed down until they hardly run.
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def available_cpus(root: Path | None = None, membership: Path | None = None) -> int:
    """Return how many CPUs this process may use, at least 1: those of its affinity, and at most its groups' quotas.

    A quota is rounded down: with a thread more, all would stand still when the quota of a period is used up.

    Args:
        root: where control groups are mounted.
        membership: the file that names the groups of this process.
    """
    groups = _groups("cpu", root or ROOT, membership or MEMBERSHIP)
    return max(1, int(min([_affinity(), *map(_cpu_quota, groups)])))


def machine_cpus() -> int:
    """Return how many CPUs the machine has, whether this process may use them or not; 1 if the system does not say."""
    return os.cpu_count() or 1


def available_memory(root: Path | None = None, membership: Path | None = None) -> int:
    """Return the bytes that the limits of this process's groups leave; ``NO_LIMIT`` or nearly so without a limit.

    Page cache that can be dropped counts as free. The arguments are those of ``available_cpus``.
    """
    return min(map(_memory_left, _groups("memory", root or ROOT, membership or MEMBERSHIP)))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def _groups(controller: str, root: Path, membership: Path) -> list[Path]:
    """Return the directories of this process's groups with their ancestors, for both versions."""
    paths = {root: "", root / controller: ""}  # version 1 has a hierarchy for each controller
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[root] = path
        elif controller in controllers.split(","):
            paths[root / controller] = paths[root / controllers] = path
    return [group for mount, path in paths.items() for group in _with_ancestors(mount, path)]


def _with_ancestors(mount: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # a group outside of what this namespace shows
        parts = []
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _cpu_quota(group: Path) -> float:
    """Return the CPUs that a group may use on average; infinity without a quota."""
    quota, _, period = _read(group / "cpu.max").partition(" ")  # "150000 100000" in microseconds, or "max 100000"
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")  # -1: no quota
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return float("inf")
    return cpus if cpus > 0 else float("inf")


def _memory_left(group: Path) -> int:
    """Return what the limits of a group leave, in bytes; ``NO_LIMIT`` without a limit."""
    for limit_files, used_file, cache in _MEMORY_FILES:
        try:
            statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            texts = [_read(group / name) for name in limit_files]
            limit, used = min(int(text) for text in texts if text.isdecimal()), int(_read(group / used_file))
            # Version 1 has here what ancestors allow, which a container cannot see otherwise.
            limit = min(limit, int(statistics.get("hierarchical_memory_limit", limit)))
            return max(0, limit - used + int(statistics.get(cache, 0)))
        except ValueError:  # only "max", or no such file
            continue
    return NO_LIMIT


def _read(path: Path) -> str:
    """Return the text of a file without white space around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""

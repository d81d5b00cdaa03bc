"""Where a process spends its CPU time: samples of py-spy, added up by module and by function.

py-spy is a program of its own (`pip install py-spy`). It reads the process's memory from outside, so it neither needs
the interpreter's lock nor prefers the moments when a thread gives it up. It cannot tell every waiting thread from a
busy one, so the threads are weighed by the CPU time that the kernel gives for each.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["HotSpot", "Profile", "profile", "summarize"]

SAMPLES_PER_S = 400
NUM_HOT_SPOTS = 25
THREAD = re.compile(r"^thread \((?P<id>\d+)\)")
FRAME = re.compile(r"^(?P<function>.*) \((?P<file>[^()]*?)(:\d+)?\)$")
STANDARD_LIBRARY = ("asyncio", "json", "contextlib", "threading", "typing", "enum", "dataclasses", "uuid", "copy")


@dataclass(frozen=True)
class HotSpot:
    """A module or function, and its share of the samples."""

    name: str
    share: float
    us: float


@dataclass(frozen=True)
class Profile:
    """The largest shares of one process; ``us`` as in the Cost that it belongs to."""

    samples: int
    modules: list[HotSpot]  # time in a module of ours or in a package, what it calls in the standard library included
    functions: list[HotSpot]  # time in a function itself

    def table(self) -> str:
        """Return both lists side by side."""
        lines = [
            f"{self.samples} samples of the ingress",
            f"{'us':>7} {'%':>5}  {'module':46} {'us':>7} {'%':>5}  function",
        ]
        for index in range(max(len(self.modules), len(self.functions))):
            left = _cell(self.modules, index)
            lines.append(f"{left:60} {_cell(self.functions, index)}".rstrip())
        return "\n".join(lines)


def _cell(spots: list[HotSpot], index: int) -> str:
    if index >= len(spots):
        return ""
    spot = spots[index]
    return f"{spot.us:7.2f} {100 * spot.share:5.1f}  {spot.name}"


def profile(py_spy: str, pid: int, seconds: float, us: float) -> Profile:
    """Sample a process for some seconds and share ``us`` out by the samples.

    Raises:
        RuntimeError: if py-spy fails, as without the right to trace the process.
    """
    with tempfile.TemporaryDirectory(prefix="pg-spy") as directory:
        stacks = Path(directory) / "stacks"
        command = [py_spy, "record", "--nonblocking", "--threads", "--format", "raw", "--output", str(stacks)]
        command += ["--pid", str(pid), "--duration", str(int(seconds)), "--rate", str(SAMPLES_PER_S)]
        before = _thread_cpu_s(pid)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not stacks.exists():
            raise RuntimeError(f"py-spy ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        used = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in _thread_cpu_s(pid).items()}
        return summarize(stacks.read_text(encoding="utf-8").splitlines(), used, us)


def _thread_cpu_s(pid: int) -> dict[int, float]:
    return {item.id: item.user_time + item.system_time for item in psutil.Process(pid).threads()}


def summarize(stacks: Iterable[str], thread_cpu_s: Mapping[int, float], us: float) -> Profile:
    """Add up collapsed stacks: thread and frames from the outermost, then the number of samples.

    Args:
        stacks: a line is ``thread (ID): NAME;function (file:line);... COUNT``.
        thread_cpu_s: seconds that each thread ran while the samples were taken.
        us: microseconds to share out.
    """
    samples: dict[int, list[tuple[list[re.Match[str]], int]]] = defaultdict(list)
    for line in stacks:
        frames, _, count = line.rpartition(" ")
        thread, *rest = frames.split(";")
        matches = [match for frame in rest if (match := FRAME.match(frame))]
        if matches and (named := THREAD.match(thread)):
            samples[int(named["id"])].append((matches, int(count)))
    modules: defaultdict[str, float] = defaultdict(float)
    functions: defaultdict[str, float] = defaultdict(float)
    total = sum(thread_cpu_s.values()) or 1.0
    for thread_id, seen in samples.items():
        weight = thread_cpu_s.get(thread_id, 0.0) / total / sum(number for _, number in seen)
        for parsed, number in seen:
            leaf = parsed[-1]
            functions[f"{leaf['function']} ({leaf['file']})"] += number * weight
            modules[_owner(parsed)] += number * weight
    modules["threads without Python frames"] = 1 - sum(modules.values())
    num_samples = sum(number for seen in samples.values() for _, number in seen)
    return Profile(num_samples, _largest(modules, us), _largest(functions, us))


def _owner(frames: list[re.Match[str]]) -> str:
    """Return the module or package of the innermost frame that is not of the standard library."""
    return next((name for frame in reversed(frames) if (name := _module(frame["file"]))), "standard library")


def _largest(shares: dict[str, float], us: float) -> list[HotSpot]:
    largest = sorted(shares.items(), key=lambda item: -item[1])[:NUM_HOT_SPOTS]
    return [HotSpot(name, round(share, 4), round(us * share, 2)) for name, share in largest]


def _module(file: str) -> str | None:
    """Return the module of ours or the package that a file belongs to; None for the standard library."""
    package, _, rest = file.partition("/")
    if package in ("deployments", "engine", "benchmarks"):
        return file.removesuffix(".py")
    if not rest or package in STANDARD_LIBRARY:
        return None
    return package

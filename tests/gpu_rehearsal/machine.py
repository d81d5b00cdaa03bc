"""Machine: the simulated host and its GPUs. It collects what a step did and must not do, each with its line.

A step may wait for the GPU once, by synchronizing an event or a stream on purpose: that is when the sampled ids arrive.
Every other wait is an error, and so is a second one. Waits are collected rather than raised, so that one run lists
them all; a device mix-up or a wrong dtype raises where it happens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tests.gpu_rehearsal.code_lines import caller_line
from tests.gpu_rehearsal.host_memory import HostMemory

__all__ = ["Capture", "Clock", "Machine", "RehearsalError"]

HOST_SECONDS = 5e-6  # of one launch
DEVICE_SECONDS = 20e-6  # of one kernel: longer, so that the GPU lags behind the host, as in a large step


class RehearsalError(AssertionError):
    """A step did what it must not do on a GPU; the message names the lines."""


class Clock:
    """Simulated time: the host's, and for each GPU the time at which it has done all that was launched."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.done_at: Counter[int] = Counter()

    def launch(self, device: int, seconds: float = DEVICE_SECONDS) -> None:
        """The host launches a kernel; the GPU runs it after those before it."""
        self.now += HOST_SECONDS
        self.done_at[device] = max(self.done_at[device], self.now) + seconds  # type: ignore[assignment]

    def wait_until(self, time: float) -> None:
        """The host waits."""
        self.now = max(self.now, time)

    def perf_counter(self) -> float:
        """What `time.perf_counter` returns; reading it takes a little time."""
        self.now += 1e-7
        return self.now


@dataclass
class Capture:
    """What a CUDA graph records: functions that do each launch again, and the data that they make."""

    launches: list[Callable[[], object]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Wait:
    """One wait of the host for a GPU."""

    kind: str
    line: str
    is_deliberate: bool  # an event's or a stream's synchronize; all others hide in an operator


class Machine:
    """The simulated machine.

    Attributes:
        waits: of the running step, or of the time before the first.
        faults: other errors of the running step, as text.
        num_launches: kernels launched, copies included.
        max_waits: how often a step may wait on purpose.
        graph_bytes: of the GPUs' memory, that CUDA graphs take.
        num_replays: of CUDA graphs.
    """

    def __init__(self, num_devices: int = 2) -> None:
        self.num_devices = num_devices
        self.clock = Clock()
        self.waits: list[Wait] = []
        self.faults: list[str] = []
        self.num_launches = 0
        self.max_waits = 1
        self.graph_bytes = 0
        self.num_replays = 0
        self._problems: dict[str, None] = {}  # of earlier steps, in order
        self.host_memory = HostMemory(self.faults.append)
        self._thread = threading.local()

    @property
    def current_device(self) -> int:
        """The calling thread's current device, 0 at first, as in CUDA."""
        return getattr(self._thread, "device", 0)

    @current_device.setter
    def current_device(self, index: int) -> None:
        if not 0 <= index < self.num_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._thread.device = index

    @property
    def captured(self) -> Capture | None:
        """What the calling thread's capture has recorded; None: it captures nothing."""
        return getattr(self._thread, "capture", None)

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Context of a CUDA graph's capture."""
        assert self.captured is None, "a capture inside a capture"
        self._thread.capture = capture = Capture()
        try:
            yield capture
        finally:
            self._thread.capture = None

    def forbid_in_capture(self, what: str) -> None:
        """Raise what CUDA would, if this thread captures a graph."""
        if self.captured is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def launch(self, device: int, num_kernels: int = 1) -> None:
        """Count a launch and let the time of its kernels pass; what is only captured takes none."""
        if self.captured is not None:
            return
        self.num_launches += 1
        self.clock.launch(device, DEVICE_SECONDS * num_kernels)

    def wait(self, kind: str, device: int, *, is_deliberate: bool = False) -> None:
        """Let the host wait until everything launched on `device` is done."""
        self.forbid_in_capture(kind)
        self.waits.append(Wait(kind, caller_line(), is_deliberate))
        self.clock.wait_until(self.clock.done_at[device])
        self.host_memory.complete(device)

    def wait_for_event(self, kind: str, device: int, time: float, num_copies: int) -> None:
        """Let the host wait for an event: for what was launched before it, the first ``num_copies`` copies included."""
        self.forbid_in_capture(kind)
        self.waits.append(Wait(kind, caller_line(), True))
        self.clock.wait_until(time)
        self.host_memory.complete(device, num_copies)

    def fault(self, problem: str) -> None:
        """Note an error of the running step."""
        self.faults.append(f"{problem} at {caller_line()}")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step of the engine; what it does wrong is kept for `check`."""
        self.waits.clear()
        self.faults.clear()
        yield
        self._problems.update(dict.fromkeys(self._problems_of_step()))

    def _problems_of_step(self) -> list[str]:
        hidden = [wait for wait in self.waits if not wait.is_deliberate]
        deliberate = [wait for wait in self.waits if wait.is_deliberate]
        problems = list(self.faults)
        problems += [f"the host waits for the GPU in {wait.kind} at {wait.line}" for wait in hidden]
        if len(deliberate) > self.max_waits:
            where = "; ".join(f"{wait.kind} at {wait.line}" for wait in deliberate)
            problems.append(f"the host waits {len(deliberate)} times for the GPU: {where}")
        return problems

    def check(self) -> None:
        """Raise what all steps since the last call did wrong.

        Raises:
            RehearsalError: if a step waited more than once or did anything else that it must not do.
        """
        problems, self._problems = self._problems, {}
        if problems:
            raise RehearsalError("\n".join(problems))

"""torch.cuda without a driver: what the engine calls, answered by the simulated machine.

Nothing of torch.cuda itself runs, except the check of a device's index (`_get_device_index`), whose errors users see.
`torch.tensor(..., device="cuda")` is replaced too: torch copies from pageable memory there, inside one operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._device  # not imported with torch; used below

from tests.gpu_rehearsal import graphs
from tests.gpu_rehearsal.device_tensor import SimulatedGpu
from tests.gpu_rehearsal.machine import Machine

__all__ = ["install"]

TOTAL_MEMORY = 64 * 2**20  # small, so that a KV pool that fills it is small too
USED_MEMORY = 8 * 2**20
H200 = SimpleNamespace(
    name="NVIDIA H200 (simulated)",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024,
    total_memory=TOTAL_MEMORY,
)
SUCCESS = 0
NOT_REGISTERED = 713


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch.cuda until the test ends. New threads watch their operators too."""
    torch._C._ensureCUDADeviceGuardSet()  # an operator's device guard would ask the driver
    # torch lists the functions to which `with torch.device(...)` applies at its first use, and keeps the list. If it
    # held our stubs, torch.tensor would ignore such a context after the test, and transformers would not notice that it
    # builds a model on the meta device: it would leave the frequencies of RoPE uninitialized.
    torch.utils._device._device_constructors()  # type: ignore[no-untyped-call]
    stubs = {**_devices(machine), **_streams(machine), **_memory(machine), **graphs.stubs(machine)}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    for name in ("tensor", "as_tensor", "asarray"):
        monkeypatch.setattr(torch, name, _copying(getattr(torch, name)))
    run = threading.Thread.run

    def run_simulated(thread: threading.Thread) -> None:
        with SimulatedGpu(machine):
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_simulated)


def _devices(machine: Machine) -> dict[str, Any]:
    def index_of(device: Any = None) -> int:
        index: int = torch.cuda._utils._get_device_index(device, optional=True) if device is not None else -1
        return machine.current_device if index < 0 else index

    def set_device(device: Any) -> None:
        machine.current_device = torch.cuda._utils._get_device_index(device)  # raises ValueError without an index

    def exchange(index: int) -> int:
        before = machine.current_device
        if index >= 0:
            machine.current_device = index
        return before

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: machine.num_devices,
        "current_device": lambda: machine.current_device,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": lambda device=None: H200,
        "get_device_capability": lambda device=None: (H200.major, H200.minor),
        "get_device_name": lambda device=None: H200.name,
        "synchronize": lambda device=None: machine.wait("torch.cuda.synchronize", index_of(device), is_deliberate=True),
    }


def _memory(machine: Machine) -> dict[str, Any]:
    def register(pointer: int, size: int, flags: int) -> int:
        machine.host_memory.register(pointer, size)
        return SUCCESS

    def unregister(pointer: int) -> int:
        return SUCCESS if machine.host_memory.unregister(pointer) else NOT_REGISTERED

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaError=SimpleNamespace(success=SUCCESS),
        cudaGetErrorString=lambda code: f"simulated CUDA error {code}",
    )
    statistics = {"allocated_bytes.all.peak": USED_MEMORY, "allocated_bytes.all.current": USED_MEMORY // 2}
    return {
        "cudart": lambda: runtime,
        "mem_get_info": lambda device=None: (TOTAL_MEMORY - USED_MEMORY - machine.graph_bytes, TOTAL_MEMORY),
        "memory_stats": lambda device=None: dict(statistics),
        "memory_reserved": lambda device=None: USED_MEMORY,
        "memory_allocated": lambda device=None: USED_MEMORY // 2,
        "max_memory_allocated": lambda device=None: USED_MEMORY,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }


def _streams(machine: Machine) -> dict[str, Any]:
    """A device has one stream here: work on side streams runs in the order in which it was launched."""

    class Event:
        """torch.cuda.Event."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self._is_timed = enable_timing
            self._wait = "Event.synchronize" if blocking else "Event.synchronize, which spins"
            self._device: int | None = None
            self._time = 0.0
            self._num_copies = 0

        def record(self, stream: Any = None) -> None:
            self._device = machine.current_device if stream is None else stream.device.index
            self._time = max(machine.clock.now, machine.clock.done_at[self._device])
            self._num_copies = machine.host_memory.num_started(self._device)

        def query(self) -> bool:
            return self._time <= machine.clock.now

        def synchronize(self) -> None:
            if self._device is None:
                return  # as CUDA does: an event that was never recorded is complete
            machine.wait_for_event(self._wait, self._device, self._time, self._num_copies)

        def wait(self, stream: Any = None) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            if not (self._is_timed and end._is_timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._device is None or end._device is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self.query() and end.query()):
                raise RuntimeError("CUDA error: device not ready")
            return (end._time - self._time) * 1e3

    class Stream:
        """torch.cuda.Stream."""

        cuda_stream = 0

        def __init__(self, device: Any = None, priority: int = 0) -> None:
            index = torch.cuda._utils._get_device_index(device, optional=True) if device is not None else None
            self.device = torch.device("cuda", machine.current_device if index is None else index)

        def synchronize(self) -> None:
            machine.wait("Stream.synchronize", self.device.index, is_deliberate=True)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def query(self) -> bool:
            return machine.clock.done_at[self.device.index] <= machine.clock.now

        def wait_stream(self, stream: Stream) -> None:
            pass

        def wait_event(self, event: Event) -> None:
            pass

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        yield

    return {
        "Event": Event,
        "Stream": Stream,
        "stream": on_stream,
        "current_stream": lambda device=None: Stream(device),
        "default_stream": lambda device=None: Stream(device),
    }


def _copying(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch.tensor or its like, with the copy to the device as an operator that can be seen."""

    def copied(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            tensor = data.to(options["dtype"]) if options.get("dtype") is not None else data
        else:
            tensor = make(data, *args, **options)
        if pin_memory:
            tensor = tensor.pin_memory()
        return tensor if device is None else tensor.to(device)

    return copied

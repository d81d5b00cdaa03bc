"""Tensor-parallel ranks as threads of this process, each with a GPU of its own, and NCCL's rules for their collectives.

NCCL hangs or corrupts memory where ranks call different collectives or pass different shapes or dtypes. Here that is
an error on every rank.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.worker.model_worker import ModelWorker
from engine.worker.ranks.rank_hosts import RankHosts
from tests.gpu_rehearsal.code_lines import caller_line
from tests.gpu_rehearsal.device_tensor import DeviceTensor
from tests.gpu_rehearsal.kernel_contracts import plain
from tests.gpu_rehearsal.machine import Machine
from tests.waiting import HANG_S

__all__ = ["ThreadRanks", "make_process_group"]

_SECONDS = 8 * HANG_S  # a rank that is this late will not come, although CI rehearses at the lowest priority


class _Meeting:
    """Where the ranks of one group meet: each brings its call and sees those of the others."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self.calls: list[Any] = [None] * size


def make_process_group(machine: Machine) -> type:
    """Return a class that takes the place of torch's ProcessGroupNCCL."""
    meetings: dict[str, _Meeting] = {}
    lock = threading.Lock()

    class ProcessGroupNCCL:
        """Its collectives return at once and order the GPU's work, so waiting for one does not block the host."""

        class Options:
            _timeout = timedelta(0)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self._rank, self._size = rank, size
            with lock:
                self._meeting = meetings.setdefault(store.path, _Meeting(size))

        def name(self) -> str:
            return "nccl"

        def allreduce(self, tensor: Any, *_: Any) -> Any:
            tensors = self._meet("allreduce", tensor)
            total = torch.stack([plain(item) for item in tensors]).sum(dim=0)
            self._done()
            plain(tensor).copy_(total)
            return self._work()

        def gather(self, parts: list[Any], tensor: Any, root: int) -> Any:
            tensors = self._meet(f"gather to {root}", tensor)
            if (self._rank == root) != bool(parts):
                raise ValueError("gather: the root alone passes output tensors")
            for part, gathered in zip(parts, tensors, strict=False):
                self._check(part)
                if (part.shape, part.dtype) != (gathered.shape, gathered.dtype):
                    raise ValueError(f"gather: a part is {part}, and a rank sends {gathered}")
                plain(part).copy_(plain(gathered))
            self._done()
            return self._work()

        def abort(self) -> None:
            self._meeting.barrier.abort()

        def _meet(self, kind: str, tensor: Any) -> list[Any]:
            """Bring this rank's tensor; return those of all ranks, which must fit."""
            self._check(tensor)
            self._meeting.calls[self._rank] = (kind, tuple(tensor.shape), tensor.dtype, tensor, caller_line())
            self._meeting.barrier.wait()
            calls = self._meeting.calls
            if len({call[:3] for call in calls}) > 1:
                described = "; ".join(f"rank {i}: {c[0]} of {c[1]}, {c[2]} at {c[4]}" for i, c in enumerate(calls))
                raise RuntimeError(f"the ranks call different collectives: {described}")
            return [call[3] for call in calls]

        def _done(self) -> None:
            self._meeting.barrier.wait()
            machine.launch(machine.current_device)

        def _check(self, tensor: Any) -> None:
            if not isinstance(tensor, DeviceTensor) or tensor.device.index != self._rank:
                raise ValueError(f"rank {self._rank} of NCCL got a tensor on {tensor.device} at {caller_line()}")
            if machine.current_device != self._rank:
                raise ValueError(f"rank {self._rank} calls NCCL with current device {machine.current_device}")
            if not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous at {caller_line()}")

        def _work(self) -> Any:
            return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

    return ProcessGroupNCCL


class ThreadRanks:
    """RemoteRanks, with a thread for each rank. Messages are pickled, so they can hold no tensor of a GPU."""

    def __init__(self, config: EngineConfig, hosts: RankHosts, abort: Callable[[], None]) -> None:
        size = config.tensor_parallel_size
        self._hosts = hosts
        self._abort = abort
        self._calls: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(1, size)]
        self._replies: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._workers = [ModelWorker(config, number) for number in range(1, size)]
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(size - 1)]
        for thread in self._threads:
            thread.start()
        self.errors: list[BaseException] = []

    def _serve(self, index: int) -> None:
        worker = self._workers[index]
        while (data := self._calls[index].get()) is not None:
            method, args, wants_reply = pickle.loads(data)
            try:
                result = getattr(worker, method)(*args)
            except BaseException as error:
                self.errors.append(error)
                self._abort()
                worker.abort()
                self._replies.put((index, None, error))
                return
            if wants_reply:
                self._replies.put((index, result, None))

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._abort()
            if self.errors and not isinstance(error, EngineDeadError):
                raise self.errors[0] from error
            raise

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        for calls in self._calls:
            calls.put(data)

    def receive(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._calls):
            index, result, error = self._replies.get(timeout=_SECONDS)
            if error is not None:
                raise error
            results[index] = result
        return [results[index] for index in sorted(results)]

    def check_health(self) -> None:
        if self.errors:
            raise EngineDeadError("a rank has failed") from self.errors[0]

    def close(self) -> None:
        for calls in self._calls:
            calls.put(None)
        for thread in self._threads:
            thread.join(_SECONDS)
        self._hosts.close()

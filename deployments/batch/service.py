"""BatchService: the stores and the runner of one ingress."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from deployments.batch.batch_run import Workplace
from deployments.batch.batch_store import BatchStore
from deployments.batch.disk import Disk
from deployments.batch.file_store import FileStore
from deployments.batch.in_process import LineCall
from deployments.batch.lease import Lease
from deployments.batch.line_slots import LineSlots
from deployments.batch.options import BatchOptions
from deployments.batch.runner import BatchRunner

__all__ = ["BatchService"]

_IO_THREADS = 2


class BatchService:
    """Files and batches in a directory.

    Args:
        options: the directory and its limits.

    Attributes:
        files: the files.
        batches: the batches.
    """

    def __init__(self, options: BatchOptions, disk: Disk | None = None) -> None:
        self.options = options
        self._disk = disk or Disk()
        self.batches = BatchStore(self._disk, options)
        self.files = FileStore(self._disk, options, self.batches.is_output)
        self._runner: BatchRunner | None = None
        self._executor = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="batch-io")

    def start(
        self,
        call: LineCall,
        num_lines: Callable[[], int],
        observe: Callable[[], Awaitable[None]],
    ) -> None:
        """Start to run batches, on the event loop of requests.

        Args:
            call: sends a line.
            num_lines: returns how many may be unfinished at once.
            observe: called about once a second while batches run.
        """
        work = Workplace(self._disk, self.files, self.batches, self.options, call, LineSlots(num_lines), self._executor)
        lease = Lease(self._disk, self.options.directory / "leases", f"{socket.gethostname()} {os.getpid()}")
        self._runner = BatchRunner(work, lease, observe)
        self._runner.start()

    def wake(self) -> None:
        """Let the runner look for batches at once, if it is this ingress's."""
        if self._runner is not None:
            self._runner.wake()

    async def close(self) -> None:
        """Leave the batches to another ingress."""
        if self._runner is not None:
            await self._runner.close()
        self._executor.shutdown(wait=False)

"""RouterServer: a router that is an HTTP server, as a child of this process, and its log."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp

__all__ = ["RouterServer", "free_port"]

READY_S = 60.0
END_S = 10.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def free_port() -> int:
    """Return a free TCP port, below those that systems give to clients: one might take it before the router does."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RouterServer:
    """The process. Its output goes on to ours, and ``on_line`` gets each line."""

    def __init__(self, port: int, on_line: Callable[[str], None]) -> None:
        self.url, self.on_line = f"http://127.0.0.1:{port}", on_line

    async def start(self, command: list[str], session: aiohttp.ClientSession, num_workers: int) -> None:
        """Start it, and wait until it has registered all workers.

        Raises:
            TimeoutError: if it does not within ``READY_S``.
            RuntimeError: if it ends instead.
        """
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self._output = asyncio.ensure_future(self._read_output())
        deadline = time.monotonic() + READY_S
        while not await self._is_ready(session, num_workers):
            if self.process.returncode is not None:
                raise RuntimeError(f"the router ended with exit code {self.process.returncode} at its start")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the router has not registered {num_workers} workers within {READY_S} s")
            await asyncio.sleep(0.1)

    async def _is_ready(self, session: aiohttp.ClientSession, num_workers: int) -> bool:
        try:
            async with session.get(f"{self.url}/v1/models") as answer:
                if answer.status != 200 or '"m"' not in await answer.text():
                    return False
            async with session.get(f"{self.url}/workers") as answer:  # the routers register workers in the background
                workers: list[dict[str, Any]] = (await answer.json())["workers"] if answer.status == 200 else []
        except (aiohttp.ClientError, ValueError, KeyError):
            return False
        healthy = [worker.get("is_healthy", str(worker.get("status")).lower() == "ready") for worker in workers]
        return sum(map(bool, healthy)) == num_workers

    async def _read_output(self) -> None:
        assert self.process.stdout is not None
        rest = ""
        while data := await self.process.stdout.read(1 << 20):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                self.on_line(_COLOUR.sub("", line))

    async def close(self) -> None:
        """End the process."""
        if not hasattr(self, "process"):
            return
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)
        with suppress(ProcessLookupError):
            self.process.kill()
        self._output.cancel()

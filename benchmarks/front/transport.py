"""The cost of a step's message from an engine to an ingress: over one stream of a Serve handle, and over ZeroMQ.

    python -m benchmarks.front.transport --out result.json

Two deployments, each in a process of its own. The sender makes a message every 4 ms, as an engine does for all streams
of one ingress; the receiver only counts them. What the processes use while no message is sent is subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.asyncio

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from deployments.launcher.environment import SETTINGS

SERVE, ZEROMQ, IDLE = "serve", "zeromq", "idle"


class Sender:
    """Sends messages both ways."""

    async def messages(self, count: int, size: int, period_s: float) -> AsyncIterator[bytes]:
        """Yield ``count`` messages of ``size`` bytes, one each ``period_s`` seconds."""
        async for message in _paced(count, size, period_s):
            yield message

    async def send(self, endpoint: str, count: int, size: int, period_s: float) -> None:
        """Send the same messages to a ZeroMQ socket."""
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(endpoint)
            async for message in _paced(count, size, period_s):
                await socket.send(message)
            await asyncio.sleep(0.5)  # for the last ones to leave

    async def cpu_s(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()


async def _paced(count: int, size: int, period_s: float) -> AsyncIterator[bytes]:
    loop, message = asyncio.get_running_loop(), os.urandom(size)
    due = loop.time()
    for _ in range(count):
        yield message
        due += period_s
        await asyncio.sleep(max(0.0, due - loop.time()))


class Receiver:
    """Receives messages both ways.

    Args:
        sender: the handle to the sender.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender.options(request_serialization="pickle", response_serialization="pickle")

    async def receive(self, mode: str, count: int, size: int, period_s: float) -> tuple[float, float]:
        """Receive ``count`` messages; returns the CPU seconds of the sender and of this process."""
        ways: dict[str, Callable[..., Awaitable[int]]] = {
            SERVE: self._over_serve,
            ZEROMQ: self._over_zeromq,
            IDLE: self._idle,
        }
        sender, own = await self._sender.cpu_s.remote(), time.process_time()
        received = await ways[mode](count, size, period_s)
        own = time.process_time() - own
        assert received in (0, count)
        return await self._sender.cpu_s.remote() - sender, own

    async def _over_serve(self, count: int, size: int, period_s: float) -> int:
        stream = self._sender.options(stream=True).messages.remote(count, size, period_s)
        return sum([1 async for _ in stream])

    async def _over_zeromq(self, count: int, size: int, period_s: float) -> int:
        with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            sending = self._sender.send.remote(f"tcp://127.0.0.1:{port}", count, size, period_s)
            for _ in range(count):
                await socket.recv()
            await sending
        return count

    async def _idle(self, count: int, size: int, period_s: float) -> int:
        await asyncio.sleep(count * period_s)
        return 0


@dataclass(frozen=True)
class TransportCost:
    """Microseconds of CPU for a message, beyond those of idle processes."""

    mode: str
    message_bytes: int
    sender_us: float
    receiver_us: float


def measure(count: int, sizes: list[int], period_s: float, repeats: int) -> list[TransportCost]:
    """Return the costs of each way and size; the ways alternate, and the least of their costs counts."""
    from ray import serve

    share = {"num_cpus": 0.1}
    sender = serve.deployment(ray_actor_options=share)(Sender).bind()
    receiver = serve.deployment(ray_actor_options=share)(Receiver).bind(sender)
    return asyncio.run(
        _measure(serve.run(receiver, name="transport", route_prefix=None), count, sizes, period_s, repeats)
    )


async def _measure(receiver: Any, count: int, sizes: list[int], period_s: float, repeats: int) -> list[TransportCost]:
    costs = []
    for size in sizes:
        seconds_by_mode: dict[str, list[tuple[float, float]]] = {SERVE: [], ZEROMQ: [], IDLE: []}
        for _ in range(repeats):
            for mode, results in seconds_by_mode.items():
                results.append(await receiver.receive.remote(mode, count, size, period_s))
        idle = [min(times) for times in zip(*seconds_by_mode.pop(IDLE), strict=True)]
        for mode, results in seconds_by_mode.items():
            least = [min(times) - base for times, base in zip(zip(*results, strict=True), idle, strict=True)]
            costs.append(TransportCost(mode, size, *(round(1e6 * seconds / count, 1) for seconds in least)))
    return costs


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the figures, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description="The cost of a message between an engine and an ingress.")
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--bytes", type=int, nargs="+", default=[64, 2048, 16384])
    parser.add_argument("--period-ms", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args(arguments)
    os.environ |= SETTINGS | {"RAY_SERVE_ENABLE_HA_PROXY": "0"} | os.environ  # read when Ray is imported and started
    import ray
    from ray import serve

    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    costs = measure(parsed.messages, parsed.bytes, parsed.period_ms / 1000, parsed.repeats)
    print(f"{'way':>8} {'bytes':>7} {'sender us':>10} {'receiver us':>12}")
    for cost in costs:
        print(f"{cost.mode:>8} {cost.message_bytes:7} {cost.sender_us:10.1f} {cost.receiver_us:12.1f}")
    if parsed.out:
        document = {"machine": describe(torch.device("cpu")), "costs": [asdict(item) for item in costs]}
        write_result(parsed.out, document)
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Seconds to read a prompt's KV from another engine process over TCP on this machine, beside those to compute it.

    python -m benchmarks.transfers --model DIR --tokens 2000 --rounds 5 --out result.json

A second process has an engine of its own and computes each prompt first. *pull* is the time to the first token of a
request that names it as the source of its KV; *compute* that of a request of the same length with no source; they
alternate, and the share is the median of their ratios. *Wire* is the time to receive the pages of a prompt, at most
64 MB, into plain memory, without an engine: *cold* for pages that the source must first copy from its device pool to
its host pool in a step, *warm* for those that are there. Both processes share the processor, and the pages cross it
twice, so a network between two machines is faster at the same rate.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.engine_options import add_engine_arguments, engine_options
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from deployments.observability.recorder import Recorder
from deployments.transport.pages.transfer import PageTransfer
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.tiers.page_format import checksum
from engine.kv.tiers.source import WantedPrefix
from engine.observability.metrics import METRICS
from engine.outputs import EngineOutput
from engine.request import EngineRequest, KVSource
from engine.sampling_params import SamplingParams

__all__ = ["Node", "main", "measure"]

HOST = "127.0.0.1"
WIRE_BYTES = 64 * 2**20
TIMEOUT_S = 600.0


class _Reader:
    """An OutputReader that waits for the end of one request."""

    def __init__(self) -> None:
        self.first_at = 0.0
        self.error: Exception | None = None
        self._has_ended = threading.Event()

    def publish(self, tags: list[None], token_ids: list[int], others: list[tuple[None, EngineOutput]]) -> None:
        self.first_at = self.first_at or perf_counter()
        if any(output.is_last for _, output in others):
            self._has_ended.set()

    def fail(self, tag: None, error: Exception) -> None:
        self.error = error
        self._has_ended.set()

    def end(self, tag: None) -> None:
        self._has_ended.set()

    def wait(self) -> None:
        """Wait for the end; raises the request's error."""
        if not self._has_ended.wait(TIMEOUT_S):
            raise TimeoutError("the engine does not answer")
        if self.error is not None:
            raise self.error


class Node:
    """An engine that exchanges pages.

    Args:
        model: its directory.
        options: of the engine.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.recorder = Recorder(METRICS)
        inner = Engine.from_config(EngineConfig.from_options(model, options), sink=self.recorder)
        if inner.tiers is None:
            raise SystemExit("the engine has no host pool: give --engine-option swap_space_gib=1")
        self.tiers = inner.tiers
        self.engine = AsyncEngine(inner)
        self.transfer = PageTransfer(self.engine, self.tiers, HOST, self.recorder)
        self.transfer.wait_until_open()
        self._num_requests = 0

    def count(self, metric: str, *labels: str) -> float:
        """Return the value of a metric; of a histogram, the sum of its observations."""
        return sum(s.value for s in self.recorder.snapshot() if s.metric.name == metric and s.labels == labels)

    def first_token_s(self, prompt: list[int], source: KVSource | None = None) -> float:
        """Return the seconds until a prompt's first token, which is also the last."""
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=1)
        request, reader = EngineRequest(f"{self._num_requests}", prompt, params, kv_source=source), _Reader()
        self.engine.check_request(request)
        started = perf_counter()
        self.engine.submit(request, reader, None)
        reader.wait()
        return reader.first_at - started

    def close(self) -> None:
        """End the engine and its transfers."""
        asyncio.run(self.engine.shutdown())
        self.transfer.close()


class _Memory:
    """Plain memory for the first blocks of a prompt: the sink of a transfer without an engine."""

    def __init__(self, num_blocks: int, sizes: Sequence[int]) -> None:
        self.first_block, self.num_blocks, self.is_cancelled = 0, num_blocks, False
        self.error: str | None = "unfinished"
        self._pages = [[memoryview(bytearray(size)) for size in sizes] for _ in range(num_blocks)]
        self._has_ended = threading.Event()

    def page_buffers(self, index: int) -> list[memoryview | None]:
        return list(self._pages[index])

    def block_done(self, index: int, checksums: Sequence[int | None]) -> bool:
        return all(
            expected is None or checksum(page) == expected
            for page, expected in zip(self._pages[index], checksums, strict=True)
        )

    def finished(self, error: str | None) -> None:
        self.error = error
        self._has_ended.set()

    def wait(self) -> None:
        """Wait for the end; raises RuntimeError if not all has come."""
        if not self._has_ended.wait(TIMEOUT_S) or self.error is not None:
            raise RuntimeError(f"the transfer has failed: {self.error}")


def _serve(connection: Connection, model: str, options: dict[str, Any]) -> None:
    """Run the source: compute each prompt that comes, until None does."""
    node = Node(model, options)
    connection.send((node.transfer.address.endpoint, node.transfer.address.secret))
    while (prompt := connection.recv()) is not None:
        connection.send(node.first_token_s(prompt))
    node.close()


def measure(model: str, options: dict[str, Any], num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the times of ``rounds`` prompts of ``num_tokens`` random tokens."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, model, options), daemon=True)
    process.start()
    node = Node(model, options)
    endpoint, secret = here.recv()
    source = KVSource(endpoint, secret, num_tokens)
    records = []
    rng = random.Random(0)
    try:
        for number in range(rounds + 1):  # the first one warms up
            pulled, computed = (rng.choices(range(10, node.engine.info.vocab_size), k=num_tokens) for _ in range(2))
            here.send(pulled)
            here.recv()
            wire = _wire(node, pulled, source)
            before = _fetched(node)
            pull_s, compute_s = node.first_token_s(pulled, source), node.first_token_s(computed)
            tokens, fetch_s = (after - then for after, then in zip(_fetched(node), before, strict=True))
            if tokens < num_tokens // 2:
                raise RuntimeError(f"only {tokens:.0f} of {num_tokens} tokens have come")
            if number:
                records.append({"pull_s": pull_s, "of_it_fetch_s": fetch_s, "compute_s": compute_s, **wire})
    finally:
        here.send(None)
        node.close()
        process.join(TIMEOUT_S)
    return _summary(node, num_tokens, records)


def _fetched(node: Node) -> tuple[float, float]:
    """Return the tokens that have come from the other engine, and the seconds that requests have waited for them."""
    return node.count("kv_tier_tokens", "peer", "in"), node.count("kv_tier_fetch_seconds", "peer")


def _wire(node: Node, prompt: list[int], source: KVSource) -> dict[str, float]:
    """Return the milliseconds of two transfers of the first pages of a prompt."""
    client = node.transfer.client
    assert client is not None
    chain, sizes = node.tiers.chain(prompt, ""), [kind.num_bytes for kind in node.tiers.format.kinds]
    num_blocks = min(chain.num_blocks, max(1, WIRE_BYTES // sum(sizes)))
    memory = _Memory(num_blocks, sizes)
    times = {}
    for name in ("cold", "warm"):
        sink = _Memory(0, sizes)
        sink.num_blocks, sink._pages = num_blocks, memory._pages
        started = perf_counter()
        client.fetch(WantedPrefix("wire", chain, 0, source), sink)
        sink.wait()
        times[f"wire_{name}_ms"] = (perf_counter() - started) * 1e3
    return times | {"wire_mb": num_blocks * sum(sizes) / 1e6}


def _summary(node: Node, num_tokens: int, records: list[dict[str, float]]) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(record[name] for record in records)

    warm_s = median("wire_warm_ms") / 1e3
    return {
        "prompt_tokens": num_tokens,
        "bytes_per_token": sum(kind.num_bytes for kind in node.tiers.format.kinds) // node.engine.info.block_size,
        "pull_s": round(median("pull_s"), 4),
        "of_it_fetch_s": round(median("of_it_fetch_s"), 4),
        "compute_s": round(median("compute_s"), 4),
        "share": round(statistics.median(r["pull_s"] / r["compute_s"] for r in records), 4),
        "wire_mb": round(median("wire_mb"), 1),
        "wire_cold_ms": round(median("wire_cold_ms"), 1),
        "wire_warm_ms": round(median("wire_warm_ms"), 1),
        "wire_gb_per_s": round(median("wire_mb") / 1e3 / warm_s, 2),
        "rounds": [{name: round(value, 4) for name, value in record.items()} for record in records],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the result; return the exit code."""
    parser = argparse.ArgumentParser(prog="transfers", description="Reading KV from another process, or computing it.")
    add_engine_arguments(parser)
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    engine = engine_options(options) | {"enable_prefix_caching": True, "skip_tokenizer_init": True}
    result = measure(options.model, engine, options.tokens, options.rounds)
    shown = {name: value for name, value in result.items() if name != "rounds"}
    print("  ".join(f"{name} {value}" for name, value in shown.items()))
    if options.out:
        write_result(options.out, {"machine": describe(torch.device("cpu")), "options": engine, **result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

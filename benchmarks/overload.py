"""`python -m benchmarks.overload`: five times the server's capacity, for a minute.

First the capacity is measured (as many clients as keep every engine full, each sending its next request when the last
one is answered), then requests come at random times whatever the answers, at 0.8 of the capacity and at 5 times it.
Client and server share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.completions import Outcome, complete, connected
from benchmarks.serving.server import Server, serve
from deployments.cli.bench.http import HttpTarget

REJECTIONS = "pagoda_ingress_rejections_total"
ENGINES = 2
MAX_NUM_SEQS = 8  # of each engine
QUEUE = 1  # requests that may wait in each engine
PROMPT_TOKENS = 64
ANSWER_TOKENS = (32, 480)  # drawn uniformly, so that answers do not end at the same time
MEAN_ANSWER_TOKENS = sum(ANSWER_TOKENS) / 2


@dataclass(frozen=True)
class Phase:
    """The outcomes of one offered load."""

    name: str
    offered_per_s: float
    accepted: int
    refused: int
    refused_by_ingress: int  # of those: by the ingress, before any engine received them
    failed: int  # for another reason
    ttft_p50_s: float  # of accepted requests
    ttft_p99_s: float
    refusal_p99_s: float
    refusal_max_s: float
    tokens_per_s: float
    memory_mib: list[float]  # of all server processes, at the beginning, in the middle, at the end


def _bodies(seed: int) -> Iterator[dict[str, Any]]:
    source = random.Random(seed)
    while True:
        prompt = source.choices(range(10, 3000), k=PROMPT_TOKENS)
        yield {"prompt": prompt, "max_tokens": source.randint(*ANSWER_TOKENS), "ignore_eos": True}


async def _closed_loop(url: str, clients: int, seconds: float) -> list[Outcome]:
    """Run clients that each send one request after the other."""
    outcomes: list[Outcome] = []
    bodies, end = _bodies(1), perf_counter() + seconds

    async def client(target: HttpTarget) -> None:
        while perf_counter() < end:
            outcomes.append(await complete(target, next(bodies)))

    with connected(url) as target:
        await asyncio.gather(*(client(target) for _ in range(clients)))
    return outcomes


async def _open_loop(url: str, rate: float, seconds: float, seed: int) -> list[Outcome]:
    """Send requests at random times, ``rate`` per second, whether or not earlier ones have ended."""
    source, bodies = random.Random(seed), _bodies(seed)
    tasks: list[asyncio.Task[Outcome]] = []
    with connected(url) as target:
        at, end = perf_counter(), perf_counter() + seconds
        while at < end:
            await asyncio.sleep(max(0.0, at - perf_counter()))
            tasks.append(asyncio.create_task(complete(target, next(bodies))))
            at += source.expovariate(rate)
        return await asyncio.gather(*tasks)


def _memory_mib(server: Server) -> float:
    launcher = psutil.Process(server.process.pid)
    return sum(_unique_bytes(item) for item in [launcher, *launcher.children(recursive=True)]) / 2**20


def _unique_bytes(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().uss)
    except psutil.Error:  # the process has ended
        return 0.0


async def _watched(server: Server, work: Any, seconds: float) -> tuple[list[Outcome], list[float]]:
    """Run ``work`` and read the memory three times while it runs."""
    task = asyncio.ensure_future(work)
    memory = []
    for _ in range(3):
        memory.append(round(await asyncio.to_thread(_memory_mib, server), 1))
        await asyncio.sleep(seconds / 2.2)
    return await task, memory


def _phase(name: str, rate: float, outcomes: list[Outcome], memory: list[float], refused_by_ingress: float) -> Phase:
    accepted = [outcome for outcome in outcomes if outcome.succeeded]
    refused = [outcome.total_s for outcome in outcomes if outcome.status == 503] or [0.0]
    first = [item.first_token_s for item in accepted] or [float("nan")]
    # From the first request to the last one sent: tokens after that belong to the tail, not to the rate.
    began, ended = min(outcome.sent for outcome in outcomes), max(outcome.sent for outcome in outcomes)
    in_time = [item for item in accepted if item.sent + item.total_s <= ended]
    return Phase(
        name,
        rate,
        len(accepted),
        sum(item.status == 503 for item in outcomes),
        int(refused_by_ingress),
        sum(not item.succeeded and item.status != 503 for item in outcomes),
        float(np.percentile(first, 50)),
        float(np.percentile(first, 99)),
        float(np.percentile(refused, 99)),
        max(refused),
        sum(item.tokens for item in in_time) / (ended - began),
        memory,
    )


def measure(server: Server, seconds: float) -> list[Phase]:
    """Return the three phases."""
    asyncio.run(_closed_loop(server.url, 4, 3.0))  # warm
    clients = ENGINES * MAX_NUM_SEQS
    outcomes, memory = asyncio.run(_watched(server, _closed_loop(server.url, clients, seconds / 2), seconds / 2))
    phases = [_phase("capacity", 0.0, outcomes, memory, server.metric(REJECTIONS))]
    capacity = phases[0].tokens_per_s / MEAN_ANSWER_TOKENS
    for name, factor in (("0.8", 0.8), ("5", 5.0)):
        rate, before = capacity * factor, server.metric(REJECTIONS)
        outcomes, memory = asyncio.run(_watched(server, _open_loop(server.url, rate, seconds, 7), seconds))
        phases.append(_phase(f"{name} x capacity", rate, outcomes, memory, server.metric(REJECTIONS) - before))
    return phases


def _change(args: dict[str, Any]) -> None:
    args["replicas"] |= {"num_engine_replicas": ENGINES, "cpus_per_engine": 0.1, "cpus_per_ingress": 0.1}
    args["engine"] |= {"max_num_seqs": MAX_NUM_SEQS}
    args["limits"] |= {"max_queued_requests_per_engine": QUEUE, "max_queued_requests": ENGINES * QUEUE}


def main() -> None:
    """Measure, print and write the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with serve(_change, engines=ENGINES) as server:
        phases = measure(server, arguments.seconds)
    for phase in phases:
        print(json.dumps(asdict(phase)))
    peak, calm, flood = phases
    print(f"TTFT p99 at 5 x against 0.8 x: {flood.ttft_p99_s / calm.ttft_p99_s:.2f} (goal: under 2)")
    print(f"slowest refusal: {flood.refusal_max_s:.3f} s (goal: within 1)")
    print(f"throughput at 5 x against the peak: {flood.tokens_per_s / peak.tokens_per_s:.2f} (goal: at least 0.9)")
    print(f"memory at 5 x, begin / middle / end: {flood.memory_mib} MiB")
    if arguments.out:
        document = {"machine": describe(torch.device("cpu")), "phases": [asdict(phase) for phase in phases]}
        write_result(arguments.out, document)


if __name__ == "__main__":
    main()

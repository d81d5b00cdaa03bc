"""`python -m benchmarks.batches`: a batch beside clients that stream, against each of them alone.

The clients, the batch, and both alternate; a client sends its next request when its answer has ended. The total is what
the engines generate for clients and batch. Client and server share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep, time_ns
from typing import Any

import numpy as np
import openai
import torch

from benchmarks.front.processes import CpuTimes
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.completions import Outcome, complete, connected
from benchmarks.serving.server import Server, serve
from deployments.cli.bench.http import HttpTarget

GENERATED, PAUSES = "pagoda_generation_tokens_total", "pagoda_batch_pauses_total"
PROMPT_TOKENS, ANSWER_TOKENS = 32, 48
ENDPOINT: Any = "/v1/completions"


@dataclass(frozen=True)
class Phase:
    """What was measured in one phase."""

    name: str
    seconds: float
    tokens_per_s: float  # of clients and batch
    client_tokens_per_s: float
    requests: int  # of clients, that ended
    failed: int
    ttft_p50_ms: float | None  # None without clients
    ttft_p99_ms: float | None
    itl_p50_ms: float | None  # between two events with tokens
    itl_p99_ms: float | None
    batch_lines: int  # that ended
    batch_pauses: int
    cores: dict[str, float]  # that each kind of process has used on average; the client is this one


def _bodies(seed: int) -> Iterator[dict[str, Any]]:
    source = random.Random(seed)
    while True:
        prompt = source.choices(range(10, 3000), k=PROMPT_TOKENS)
        yield {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}


async def _clients(url: str, number: int, seconds: float) -> list[Outcome]:
    """Run clients with prompts that no cache has for a time; answers that have begun are read to their end."""
    outcomes: list[Outcome] = []
    bodies, end = _bodies(time_ns()), perf_counter() + seconds

    async def client(target: HttpTarget) -> None:
        while perf_counter() < end:
            outcomes.append(await complete(target, next(bodies)))

    with connected(url) as target:
        await asyncio.gather(*(client(target) for _ in range(number)))
    return outcomes


class _Batches:
    """Batches of one server."""

    def __init__(self, server: Server) -> None:
        self._api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120.0)

    def start(self, lines: int, seed: int) -> str:
        """Start a batch; returns its id once it runs."""
        bodies = _bodies(seed)
        requests = [
            {"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": next(bodies)}
            for number in range(lines)
        ]
        content = "\n".join(map(json.dumps, requests)).encode()
        file = self._api.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = self._api.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        batch_id: str = batch.id
        while not self.completed(batch_id):
            sleep(0.2)
        return batch_id

    def completed(self, batch_id: str) -> int:
        """Return how many lines have ended.

        Raises:
            RuntimeError: if the batch has ended: it was too short for the phase.
        """
        batch = self._api.batches.retrieve(batch_id)
        if batch.status not in ("validating", "in_progress"):
            raise RuntimeError(f"the batch is {batch.status} before the end of the phase; give more --lines")
        return 0 if batch.request_counts is None else batch.request_counts.completed

    def stop(self, batch_id: str) -> None:
        """Cancel a batch, and wait for its end."""
        self._api.batches.cancel(batch_id)
        while self._api.batches.retrieve(batch_id).status != "cancelled":
            sleep(0.2)


def _phase(server: Server, name: str, clients: int, seconds: float, batch: tuple[_Batches, str] | None) -> Phase:
    def counted() -> tuple[float, float, int, dict[str, float]]:
        lines = 0 if batch is None else batch[0].completed(batch[1])
        return server.metric(GENERATED), server.metric(PAUSES), lines, cpu.read() | {"client": process_time()}

    cpu = CpuTimes(server.process.pid)

    before, began = counted(), perf_counter()
    outcomes = asyncio.run(_clients(server.url, clients, seconds)) if clients else []
    if not clients:
        sleep(seconds)
    after, ended = counted(), perf_counter()
    good = [outcome for outcome in outcomes if outcome.succeeded]
    first = [1e3 * outcome.first_token_s for outcome in good]
    gaps = [1e3 * float(gap) for outcome in good for gap in np.diff(outcome.arrivals_s)]
    return Phase(
        name,
        round(ended - began, 2),
        round((after[0] - before[0]) / (ended - began), 1),
        round(sum(outcome.tokens for outcome in good) / (ended - began), 1),
        len(good),
        len(outcomes) - len(good),
        _percentile(first, 50),
        _percentile(first, 99),
        _percentile(gaps, 50),
        _percentile(gaps, 99),
        after[2] - before[2],
        int(after[1] - before[1]),
        {kind: round((used - before[3][kind]) / (ended - began), 2) for kind, used in after[3].items()},
    )


def _percentile(values: list[float], share: float) -> float | None:
    return round(float(np.percentile(values, share)), 2) if values else None


def measure(server: Server, clients: int, lines: int, seconds: float, rounds: int = 1) -> list[Phase]:
    """Return the phases: in each round clients alone, batch alone, both, and clients alone again."""
    batches = _Batches(server)
    asyncio.run(_clients(server.url, clients, 3.0))  # warm
    phases = []
    for number in range(rounds):
        phases.append(_phase(server, "clients", clients, seconds, None))
        batch_id = batches.start(lines, seed=2 + number)
        phases.append(_phase(server, "batch", 0, seconds, (batches, batch_id)))
        phases.append(_phase(server, "both", clients, seconds, (batches, batch_id)))
        batches.stop(batch_id)
        phases.append(_phase(server, "clients", clients, seconds, None))
    return phases


def ratios(phases: Sequence[Phase]) -> dict[str, float]:
    """Return what the batch and the clients are together, as ratios of the medians over the phases.

    Of the clients' times beside the batch to those without it, of the tokens that they get to those without it, and of
    all tokens to those of the batch alone.
    """

    def middle(name: str, field: str) -> float:
        return float(median(getattr(phase, field) for phase in phases if phase.name == name))

    times = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    result = {name: middle("both", name) / max(middle("clients", name), 0.01) for name in times}
    result["client_tokens"] = middle("both", "client_tokens_per_s") / middle("clients", "client_tokens_per_s")
    result["all_tokens"] = middle("both", "tokens_per_s") / middle("batch", "tokens_per_s")
    return {name: round(value, 3) for name, value in result.items()}


def main() -> None:
    """Measure, print and write the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-slowdown", type=float, default=1.1, help="batches.max_slowdown of the server")
    parser.add_argument("--note", default="", help="about the machine, for the file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batches") as directory:

        def change(args: dict[str, Any]) -> None:
            args["replicas"] |= {"num_engine_replicas": arguments.engines, "cpus_per_engine": 0.1}
            args["batches"] |= {"directory": directory, "max_slowdown": arguments.max_slowdown}

        with serve(change, engines=arguments.engines) as server:
            phases = measure(server, arguments.clients, arguments.lines, arguments.seconds, arguments.rounds)
    for phase in phases:
        print(json.dumps(asdict(phase)))
    print(f"{ratios(phases)} (goals: p99 at most 1.1, all_tokens at least 0.95)")
    if arguments.out:
        machine = {**describe(torch.device("cpu")), "note": arguments.note}
        settings = {name: getattr(arguments, name) for name in ("clients", "lines", "engines", "max_slowdown")}
        result = {"ratios": ratios(phases), "phases": [asdict(phase) for phase in phases]}
        write_result(arguments.out, {"machine": machine, **settings, **result})


if __name__ == "__main__":
    main()

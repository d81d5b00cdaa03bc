"""`python -m benchmarks.hostile`: what clients that take all that they can cost the others.

First 4,200 idle connections of one address and 400 streams of another, and meanwhile ordinary requests of a third. Then
bursts of 2,000 streams, and meanwhile health probes; the client's times to first token beside the engines', which count
from the arrival at an engine. The ingress's memory is read after each. Client and server share this machine, whose
pauses (benchmarks/serving/pauses.py) are measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.front.processes import CpuTimes
from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.pauses import Pauses, watching_pauses
from benchmarks.serving.server import Server, serve
from benchmarks.serving.streams import Reply, StreamOutcome, idle_connections, open_streams, probing, send
from deployments.launcher.direct import direct_urlopen

ENGINES = 2
IDLE_CONNECTIONS, STREAMS_BESIDE = 4200, 400
BURST, BURSTS = 2000, 3
PROMPT_WORDS, ANSWER_TOKENS = 30, 16
WORDS = ["cache", "block", "token", "prefix", "page", "attention", "step", "batch", "model", "queue"]
IDLE, STREAMS, OTHER, PROBES = (f"127.0.7.{number}" for number in range(1, 5))  # addresses
PATHS = ("/health", "/-/healthz")
TTFT = "pagoda_time_to_first_token_seconds"


@dataclass(frozen=True)
class Times:
    """Seconds of answers, and how many there were."""

    count: int
    first: float
    p50: float
    p99: float
    max: float
    p99_without_pauses: float
    max_without_pauses: float

    @classmethod
    def of(cls, replies: Sequence[Reply], pauses: Pauses) -> Times:
        """Summarize them; the first is of the client that came first."""
        seconds = [reply.seconds for reply in replies]
        without = [reply.seconds_without(pauses) for reply in replies]
        p50, p99, p99_without = (
            float(np.percentile(values, at)) for values, at in ((seconds, 50), (seconds, 99), (without, 99))
        )
        values = (seconds[0], p50, p99, max(seconds), p99_without, max(without))
        return cls(len(replies), *(round(value, 3) for value in values))


@dataclass(frozen=True)
class Burst:
    """One burst: its end, the probes meanwhile, and times to first token."""

    statuses: dict[int, int]
    seconds: float
    paused_s: float  # the machine, meanwhile
    ingress_mib: float  # that no other process shares, afterwards
    probes: dict[str, Times]
    client_ttft_p50_s: float
    client_ttft_mean_s: float
    engine_ttft_p50_s: float  # interpolated within the histogram's bucket
    engine_ttft_mean_s: float
    p50_ratio: float  # of the client's to the engine's
    mean_ratio: float


class TtftHistogram:
    """The engines' histogram of times to first token, from the text of /metrics."""

    def __init__(self, text: str) -> None:
        self.counts: Counter[float] = Counter()  # cumulated, by the bucket's upper bound
        self.sum = 0.0
        families = text_string_to_metric_families(text)
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == f"{TTFT}_bucket":
                self.counts[float(sample.labels["le"])] += round(sample.value)
            elif sample.name == f"{TTFT}_sum":
                self.sum += sample.value

    def since(self, before: TtftHistogram) -> tuple[float, float]:
        """Return the median, interpolated within its bucket, and the mean of what came after ``before``.

        Raises:
            ValueError: nothing came.
        """
        counts = {bound: count - before.counts[bound] for bound, count in sorted(self.counts.items())}
        total, below, lower = max(counts.values()), 0, 0.0
        if not total:
            raise ValueError("the engines have had no requests; is the server the one that was measured?")
        for upper, count in counts.items():
            if count >= total / 2:
                share = (total / 2 - below) / (count - below)
                return lower + share * (upper - lower), (self.sum - before.sum) / total
            below, lower = count, upper
        raise AssertionError("the last bucket has all requests")


def _ttft(server: Server) -> TtftHistogram:
    with direct_urlopen(f"{server.url}/metrics", timeout=60) as answer:
        return TtftHistogram(answer.read().decode())


def _bodies(count: int, source: random.Random) -> list[dict[str, Any]]:
    return [
        {"prompt": " ".join(source.choices(WORDS, k=PROMPT_WORDS)), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        for _ in range(count)
    ]


async def _beside_streams(port: int, priority: int) -> tuple[list[StreamOutcome], list[Reply]]:
    """Open the streams, and send one ordinary request after the other until they have ended."""
    streams = asyncio.create_task(open_streams(port, _bodies(STREAMS_BESIDE, random.Random(priority)), address=STREAMS))
    replies: list[Reply] = []
    body = {"prompt": "An ordinary question", "max_tokens": 8, "priority": priority}
    while not streams.done():
        replies.append(await asyncio.to_thread(send, port, "/v1/completions", address=OTHER, body=body))
    return await streams, replies


def other_address(port: int, priority: int) -> dict[str, Any]:
    """Return how ordinary requests fare beside idle connections and streams of other addresses."""
    with idle_connections(port, IDLE_CONNECTIONS, address=IDLE), watching_pauses() as pauses:
        outcomes, replies = asyncio.run(_beside_streams(port, priority))
    return {
        "priority": priority,
        "statuses": dict(Counter(item.status for item in replies)),
        "streams": dict(Counter(item.status for item in outcomes)),
        "paused_s": round(pauses.seconds, 3),
        "times": asdict(Times.of(replies, pauses)),
    }


def burst(server: Server, port: int, ingresses: Sequence[int], seed: int) -> Burst:
    """Open the streams of one burst and probe meanwhile."""
    before = _ttft(server)
    with watching_pauses() as pauses, probing(port, PATHS, address=PROBES) as replies:
        outcomes = asyncio.run(open_streams(port, _bodies(BURST, random.Random(seed)), address=STREAMS))
    engine_p50, engine_mean = _ttft(server).since(before)
    first = [outcome.first_token_s for outcome in outcomes if outcome.first_token_s]
    p50, mean = float(np.percentile(first, 50)), float(np.mean(first))
    return Burst(
        dict(Counter(outcome.status for outcome in outcomes)),
        round(max(outcome.total_s for outcome in outcomes), 2),
        round(pauses.seconds, 3),
        _unique_mib(ingresses),
        {path: Times.of(of_path, pauses) for path, of_path in replies.items()},
        *(round(value, 3) for value in (p50, mean, engine_p50, engine_mean, p50 / engine_p50, mean / engine_mean)),
    )


def _unique_mib(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().uss / 2**20
    return round(total, 1)


def _change(args: dict[str, Any]) -> None:
    args["replicas"] |= {"num_engine_replicas": ENGINES}


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with serve(_change, engines=ENGINES) as server:
        port = urlsplit(server.url).port or 80
        ingresses = CpuTimes(server.process.pid).pids("ingress")
        asyncio.run(open_streams(port, _bodies(50, random.Random(0)), address=STREAMS))  # warm
        memory = {"start_mib": _unique_mib(ingresses)}
        beside = [other_address(port, priority) for priority in (0, 1)]
        memory["after_idle_connections_mib"] = _unique_mib(ingresses)
        bursts = [burst(server, port, ingresses, 10 + number) for number in range(BURSTS)]
    print(f"{IDLE_CONNECTIONS} idle connections and {STREAMS_BESIDE} streams; ordinary requests of another address:")
    for reply in beside:
        print(f"  {json.dumps(reply)}")
    print(f"{BURST} streams at once:")
    for measured in bursts:
        print(f"  {json.dumps(asdict(measured))}")
    print(f"ingress: {json.dumps(memory)}, after bursts: {[item.ingress_mib for item in bursts]} MiB")
    if arguments.out:
        document = {
            "machine": describe(torch.device("cpu")),
            "other_address": beside,
            "bursts": [asdict(item) for item in bursts],
            "ingress_memory": memory,
        }
        write_result(arguments.out, document)


if __name__ == "__main__":
    main()

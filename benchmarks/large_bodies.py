"""`python -m benchmarks.large_bodies`: streams and health probes beside requests of 16 MB.

One client sends such a request again and again to a server whose other clients stream, and to one that embeds texts.
Phases without and with it alternate, on one server: the gaps between two events of a stream, and the seconds until
/health answers, as ratios of the medians over the phases. Clients and server share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.result_file import write_result
from benchmarks.serving.completions import complete, connected
from benchmarks.serving.server import serve
from benchmarks.serving.streams import LOOPBACK, probing

MAX_BYTES = 16 * 2**20 - 1024  # the limit of a body, less what is around the texts
TEXTS = 2048
WORDS = ["cache", "block", "token", "prefix", "page", "attention", "step", "batch", "model", "queue"]
STREAMS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 32, 128
HEALTH = "/health"


@dataclass(frozen=True)
class Phase:
    """Milliseconds, with or without large requests; None where there was nothing to measure."""

    name: str  # of the request; empty without
    statuses: dict[int, int]  # of the large requests
    large_s: float | None  # median seconds of a large request
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    gap_max_ms: float | None
    health_p50_ms: float | None
    health_p99_ms: float | None
    health_max_ms: float | None


def _texts(number: int) -> list[str]:
    size = MAX_BYTES // number - len('"",')
    words = " ".join(random.Random(1).choices(WORDS, k=20_000))
    words *= 1 + (number + size) // len(words)
    return [words[start : start + size] for start in range(number)]


def _token_ids(number: int) -> list[list[int]]:
    size = MAX_BYTES // number // len("1000,") - 1
    token_ids = random.Random(2).choices(range(1000, 4000), k=number + size)
    return [token_ids[start : start + size] for start in range(number)]


def requests_of(task: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the large requests by name: the path and the body. A server of the other task only reads them."""
    messages = [{"role": "user", "content": text[:-32]} for text in _texts(TEXTS)]
    embedding: dict[str, Any] = {"truncate_prompt_tokens": 16}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "texts": ("/v1/embeddings", {"input": _texts(TEXTS), **embedding}),
        "token ids": ("/v1/embeddings", {"input": _token_ids(TEXTS), **embedding}),
        "prompts of token ids": ("/v1/completions", {"prompt": _token_ids(1024)}),
        "conversation": ("/v1/chat/completions", {"messages": messages}),
        "one message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _texts(1)[0]}]}),
    }
    return requests if task == "generate" else {name: requests[name] for name in ("texts", "token ids")}


@contextmanager
def _sending(port: int, path: str, data: bytes) -> Iterator[list[tuple[int, float]]]:
    """Send a request again and again, in a thread, while the block runs; yields status and seconds of each."""
    sent: list[tuple[int, float]] = []
    has_ended = threading.Event()

    def send() -> None:
        while not has_ended.is_set():
            started = perf_counter()
            connection = HTTPConnection(LOOPBACK, port, timeout=120)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            connection.close()
            sent.append((answer.status, perf_counter() - started))
            has_ended.wait(0.2)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        has_ended.set()
        thread.join()


async def _gaps(url: str, seconds: float) -> list[float]:
    """Return the gaps of all streams, in seconds."""
    gaps: list[float] = []
    end = perf_counter() + seconds
    source = random.Random(3)

    async def stream(target: Any) -> None:
        while perf_counter() < end:
            prompt = source.choices(range(10, 3000), k=PROMPT_TOKENS)
            outcome = await complete(target, {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True})
            if not outcome.succeeded:
                raise RuntimeError(f"a stream has failed: {outcome.error}")
            gaps.extend(map(float, np.diff(outcome.arrivals_s)))

    with connected(url) as target:
        await asyncio.gather(*(stream(target) for _ in range(STREAMS)))
    return gaps


def _phase(url: str, task: str, seconds: float, name: str = "", request: tuple[str, bytes] | None = None) -> Phase:
    port = urlsplit(url).port or 80

    def measure() -> tuple[list[float], list[float]]:
        with probing(port, [HEALTH], address=LOOPBACK) as replies:
            if task == "generate":
                gaps = asyncio.run(_gaps(url, seconds))
            else:
                gaps = []
                threading.Event().wait(seconds)
        failed = [reply.status for reply in replies[HEALTH] if reply.status != 200]
        if failed:
            raise RuntimeError(f"{HEALTH} has answered with {failed}")
        return gaps, [reply.seconds for reply in replies[HEALTH]]

    sent: list[tuple[int, float]] = []
    if request is None:
        gaps, probes = measure()
    else:
        with _sending(port, *request) as sent:
            gaps, probes = measure()
    return Phase(
        name,
        dict(Counter(status for status, _ in sent)),
        round(median(seconds for _, seconds in sent), 2) if sent else None,
        *(_ms(gaps, share) for share in (50, 99, 100)),
        *(_ms(probes, share) for share in (50, 99, 100)),
    )


def _ms(values: Sequence[float], share: float) -> float | None:
    return round(1e3 * float(np.percentile(values, share)), 2) if values else None


def ratios(phases: Sequence[Phase]) -> dict[str, dict[str, float]]:
    """Return, by name of a request, the ratios of the medians over its phases to those without any."""
    result: dict[str, dict[str, float]] = {}
    fields = ("gap_p50_ms", "gap_p99_ms", "health_p50_ms", "health_p99_ms")
    for name in sorted({phase.name for phase in phases} - {""}):
        result[name] = {}
        for field in fields:
            without, beside = (
                [value for phase in phases if phase.name == wanted and (value := getattr(phase, field)) is not None]
                for wanted in ("", name)
            )
            if without:
                result[name][field.removesuffix("_ms")] = round(median(beside) / median(without), 2)
    return result


def measure(task: str, rounds: int, seconds: float) -> list[Phase]:
    """Return the phases of one server: in each round one without, and one with each request."""
    requests = {
        name: (path, json.dumps(body, separators=(",", ":")).encode())
        for name, (path, body) in requests_of(task).items()
    }

    def change(args: dict[str, Any]) -> None:
        args["task"] = task
        args["replicas"] |= {"num_engine_replicas": 1, "cpus_per_engine": 0.1}

    phases: list[Phase] = []
    with serve(change) as server:
        _phase(server.url, task, 2.0)  # warm
        for _ in range(rounds):
            phases.append(_phase(server.url, task, seconds))
            for name, request in requests.items():
                phases.append(_phase(server.url, task, seconds, name, request))
            for phase in phases[-1 - len(requests) :]:
                print(json.dumps(asdict(phase)), flush=True)
    return phases


def main() -> None:
    """Measure, print and write the phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a phase")
    parser.add_argument("--tasks", nargs="+", choices=["generate", "embed"], default=["generate", "embed"])
    parser.add_argument("--note", default="", help="about the machine, for the file")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"machine": {**describe(torch.device("cpu")), "note": arguments.note}}
    for task in arguments.tasks:
        phases = measure(task, arguments.rounds, arguments.seconds)
        document[task] = {"ratios": ratios(phases), "phases": [asdict(phase) for phase in phases]}
        for name, values in ratios(phases).items():
            print(f"{task} {name}: {values} (goal: at most 1.5)")
    if arguments.out:
        write_result(arguments.out, document)


if __name__ == "__main__":
    main()

"""A cheap load generator: `python -m benchmarks.serving.load URL --clients N`.

Each client sends its next request when its answer has ended. The generator shares the server's machine, so it does as
little as possible: one loop over non-blocking sockets, which counts events in the bytes and parses no JSON. It prints
"measuring" after the warm-up and one line of JSON, a LoadResult, at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.serving.server import ROOT
from deployments.cli.bench.prompts import random_ids

__all__ = ["Answer", "LoadProcess", "LoadResult", "Window", "main", "measure", "run_load"]

MODEL = "benchmark"
MEASURING = "measuring"
EVENT, END_OF_STREAM = b"data: {", b"\r\n0\r\n\r\n"
RECEIVE_BYTES = 1 << 18
POLL_S = 0.05
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class LoadResult:
    """What the clients saw in the measured time."""

    clients: int
    max_tokens: int
    streamed: bool
    seconds: float
    requests: int  # that ended
    failed: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float  # of whole answers, the time of the answer
    ttft_p99_ms: float
    tokens_per_event: float  # above 1: the server has joined tokens
    client_cpu_s: float  # of this process


@dataclass
class Answer:
    """Reads the bytes of one HTTP answer."""

    streamed: bool
    num_events: int = 0
    is_done: bool = False
    is_failed: bool = False
    _tail: bytes = b""  # of a body; before the body, all that has come
    _left: int | None = None  # bytes of a whole answer that have not come; None: in the head, or a stream
    _in_body: bool = False

    def feed(self, data: bytes) -> int:
        """Take what has come; return the number of events with tokens in it."""
        if not self._in_body:
            head, end, data = (self._tail + data).partition(b"\r\n\r\n")
            if not end:
                self._tail = head
                return 0
            self._read_head(head)
        return self._count(data) if self.streamed else self._measure(data)

    def _read_head(self, head: bytes) -> None:
        self._in_body, self._tail = True, b"\r\n"  # what ends the head also precedes the first chunk
        status, *fields = head.lower().split(b"\r\n")
        self.is_failed = b" 200" not in status
        lengths = [int(item.partition(b":")[2]) for item in fields if item.startswith(b"content-length:")]
        if lengths:
            self.streamed, self._left = False, lengths[0]

    def _count(self, data: bytes) -> int:
        num_new = (self._tail[1 - len(EVENT) :] + data).count(EVENT)
        self._tail = (self._tail + data)[-16:]
        self.is_done = self._tail.endswith(END_OF_STREAM)
        self.num_events += num_new
        return num_new

    def _measure(self, data: bytes) -> int:
        if self._left is None:
            raise ValueError("the answer has neither chunks nor a length; load generates no such requests")
        self._left -= len(data)
        self.is_done = self._left <= 0
        self.num_events = int(self.is_done)
        return self.num_events


@dataclass
class Window:
    """Counts what happens in the measured time, ``start`` to ``end`` on perf_counter's clock."""

    start: float
    end: float
    num_events: int = 0
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)  # of requests that were sent in the window
    answers: list[int] = field(default_factory=list)  # events of each answer that ended in the window

    def result(self, clients: int, max_tokens: int, *, streamed: bool, client_cpu_s: float) -> LoadResult:
        """Return the figures. Answers that are cut off count as far as they came."""
        seconds = self.end - self.start
        per_event = max_tokens * len(self.answers) / sum(self.answers) if self.answers else 1.0
        p50, p99 = np.percentile(self.ttft_s, (50, 99)) if self.ttft_s else (float("nan"),) * 2
        return LoadResult(
            clients,
            max_tokens,
            streamed,
            round(seconds, 3),
            len(self.answers),
            self.failed,
            round(self.num_events * per_event / seconds, 1),
            round(len(self.answers) / seconds, 1),
            round(1e3 * float(p50), 2),
            round(1e3 * float(p99), 2),
            round(per_event, 3),
            round(client_cpu_s, 3),
        )


class _Client:
    """One connection, which sends one request after the other."""

    def __init__(self, number: int, address: tuple[str, int], window: Window, body: dict[str, object]) -> None:
        self._random = random.Random(number)
        self._window = window
        self._body = body
        self._streamed = bool(body["stream"])
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)

    def send(self) -> None:
        """Send the next request; its prompt is new."""
        prompt = random_ids(self._random, PROMPT_TOKENS)
        body = json.dumps(self._body | {"prompt": prompt}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\n"
        self._answer, self._sent, self._has_token = Answer(self._streamed), perf_counter(), False
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def read(self) -> None:
        """Take what has come, and send the next request if the answer has ended.

        Raises:
            ConnectionError: if the server closes the connection, or refuses a request.
        """
        data = self.socket.recv(RECEIVE_BYTES)
        now, window = perf_counter(), self._window
        num_events = self._answer.feed(data)
        if not data or self._answer.is_failed:
            raise ConnectionError(f"the server closed the connection or refused the request: {data[:500]!r}")
        is_measured = window.start <= now < window.end
        if num_events and not self._has_token:
            self._has_token = True
            if is_measured and self._sent >= window.start:
                window.ttft_s.append(now - self._sent)
        if is_measured:
            window.num_events += num_events
            if self._answer.is_done:
                window.answers.append(self._answer.num_events)
        if self._answer.is_done:
            self.send()


def run_load(
    url: str, model: str, clients: int, *, max_tokens: int, streamed: bool, warm_s: float, seconds: float
) -> LoadResult:
    """Keep ``clients`` requests running and measure for ``seconds`` after the warm-up."""
    address = urlsplit(url)
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": streamed}
    start = perf_counter() + warm_s
    window = Window(start, start + seconds)
    with ExitStack() as open_until_end, selectors.DefaultSelector() as selector:
        for number in range(clients):
            client = _Client(number, (address.hostname or "", address.port or 80), window, body)
            open_until_end.enter_context(client.socket)
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send()
        cpu_s = _read_until_end(selector, window)
        return window.result(clients, max_tokens, streamed=streamed, client_cpu_s=cpu_s)


def _read_until_end(selector: selectors.BaseSelector, window: Window) -> float:
    """Run the clients to the end of the window; return the CPU seconds that this takes in the window."""
    cpu_s: float | None = None
    while (now := perf_counter()) < window.end and selector.get_map():
        if cpu_s is None and now >= window.start:
            cpu_s = process_time()
            print(MEASURING, flush=True)
        for key, _ in selector.select(POLL_S):
            try:
                key.data.read()
            except ConnectionError as error:
                window.failed += 1
                if window.failed == 1:  # the others are probably alike
                    print(error, file=sys.stderr, flush=True)
                selector.unregister(key.fileobj)
    return 0.0 if cpu_s is None else process_time() - cpu_s


class LoadProcess:
    """The load generator as a process of its own.

    Args:
        url: of the server.
        clients: requests that run at once.
        model: named in the requests.
        max_tokens: of each answer.
        streamed: or whole.
        warm_s: seconds of load before those that are measured.
        seconds: that are measured.
    """

    def __init__(
        self,
        url: str,
        clients: int,
        *,
        model: str = MODEL,
        max_tokens: int = 64,
        streamed: bool = True,
        warm_s: float = 2.0,
        seconds: float = 6.0,
    ) -> None:
        command = [sys.executable, "-m", __spec__.name, url, "--model", model, "--clients", str(clients)]
        command += ["--max-tokens", str(max_tokens), "--warm", str(warm_s), "--seconds", str(seconds)]
        command += [] if streamed else ["--whole"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def wait_until_measuring(self) -> None:
        """Return when the warm-up has ended.

        Raises:
            RuntimeError: if no request succeeds.
        """
        if (line := self._read()) != MEASURING:
            raise RuntimeError(f"the load generator measured nothing: {line or 'it has failed'}")

    def result(self) -> LoadResult:
        """Return the figures, at the end of the measured time."""
        result = LoadResult(**json.loads(self._read()))
        self._process.wait()
        return result

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(url: str, clients: int, **options: Any) -> LoadResult:
    """Run the load in a process of its own and return its figures.

    Raises:
        RuntimeError: as ``LoadProcess.wait_until_measuring``.
    """
    load = LoadProcess(url, clients, **options)
    load.wait_until_measuring()
    return load.result()


def main(arguments: list[str] | None = None) -> None:
    """Run the load and print its result."""
    parser = argparse.ArgumentParser(description="A load generator that costs little.")
    parser.add_argument("url")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--whole", action="store_true", help="answers that are not streamed")
    parser.add_argument("--warm", type=float, default=2.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=6.0)
    parsed = parser.parse_args(arguments)
    result = run_load(
        parsed.url,
        parsed.model,
        parsed.clients,
        max_tokens=parsed.max_tokens,
        streamed=not parsed.whole,
        warm_s=parsed.warm,
        seconds=parsed.seconds,
    )
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()

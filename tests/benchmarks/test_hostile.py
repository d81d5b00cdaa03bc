"""The clients of benchmarks/serving/streams.py and the figures of benchmarks/hostile.py, on servers of a few lines."""

from __future__ import annotations

import asyncio
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.hostile import Times, TtftHistogram
from benchmarks.serving.pauses import Pauses
from benchmarks.serving.streams import Reply, idle_connections, open_streams, probing, send
from tests.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
METRICS = """
# TYPE pagoda_time_to_first_token_seconds histogram
pagoda_time_to_first_token_seconds_bucket{{replica="a",le="1.0"}} {0}
pagoda_time_to_first_token_seconds_bucket{{replica="a",le="2.0"}} {1}
pagoda_time_to_first_token_seconds_bucket{{replica="a",le="+Inf"}} {1}
pagoda_time_to_first_token_seconds_sum{{replica="a"}} {2}
pagoda_time_to_first_token_seconds_count{{replica="a"}} {1}
"""


@pytest.mark.parametrize(
    ("parts", "status", "is_complete"),
    [
        ([HEAD, b'data: {"a": 1}\n\n', b"data: [DO", b"NE]\n\n"], 200, True),
        ([HEAD + b'data: {"a": 1}\n\ndata: [DONE]\n\n'], 200, True),
        ([HEAD, b'data: {"a": 1}\n\n'], 200, False),
        ([b"HTTP/1.", b"1 503 Service Unavailable\r\n\r\n{}"], 503, False),
        ([b""], 0, False),
    ],
)
async def test_the_end_of_each_stream_is_known(parts: list[bytes], status: int, is_complete: bool) -> None:
    handlers: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        await reader.readuntil(b"}")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)  # the client may read this part before the next one
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for item in await open_streams(port, [{"prompt": "a"}] * 2, address="127.0.0.9"):
            assert (item.status, item.is_complete) == (status, is_complete)
            assert (item.first_token_s > 0) == (status == 200)
            assert item.total_s >= item.first_token_s
        await asyncio.gather(*filter(None, handlers))


async def test_a_server_that_refuses_is_an_outcome() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        (stream,) = await open_streams(port, [{}])
        assert (stream.status, stream.first_token_s) == (0, 0.0)
        assert send(port, "/", address="127.0.0.1").status == 0
        with idle_connections(port, 3) as opened:
            assert len(opened) == 3


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


def test_probes_go_on_until_the_end_of_the_block() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with probing(server.server_port, ["/health", "/other"], address="127.0.0.9") as replies:
            until(lambda: min(map(len, replies.values())) >= 3, "three replies for each path")
        server.shutdown()
        thread.join()
    assert {path: {item.status for item in of_path} for path, of_path in replies.items()} == {
        "/health": {204},
        "/other": {404},
    }


def test_the_engines_median_is_interpolated() -> None:
    before = TtftHistogram(METRICS.format(10, 10, 5.0))
    after = TtftHistogram(METRICS.format(20, 50, 60.0))  # 10 below 1 s, 30 from 1 to 2 s
    median, mean = after.since(before)
    assert median == pytest.approx(1 + 1 / 3)
    assert mean == pytest.approx(55 / 40)
    with pytest.raises(ValueError, match="no requests"):
        after.since(after)


def test_times_are_summarized() -> None:
    seconds = [3.0, *[1.0] * 198, 2.0]
    replies = [Reply(200, taken, started=10.0 * number) for number, taken in enumerate(seconds)]
    times = Times.of(replies, Pauses([(1.0, 3.5)]))
    assert (times.count, times.first, times.p50, times.max) == (200, 3.0, 1.0, 3.0)
    assert 1.0 < times.p99 <= 2.0
    assert times.max_without_pauses == 2.0
    assert times.p99_without_pauses == 1.0

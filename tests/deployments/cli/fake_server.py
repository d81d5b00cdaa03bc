"""A server with the endpoints that the commands ask, in this process, whose answers a test chooses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CELLS = "AQAA"


def live(**changes: Any) -> dict[str, Any]:
    """Return an answer of GET /live, in the form that deployments/web/live_view.py documents."""
    replica = {
        "name": "abc12345",
        "running": 3,
        "waiting": 1,
        "swapped": 0,
        "prompt_tokens": 900,
        "generated_tokens": 500,
        "query_tokens": 900,
        "hit_tokens": 600,
        "evicted_blocks": 7,
        "preemptions": 0,
        "blocks": {"free": 10, "cached": 20, "used": 70, "shared": 30},
        "num_blocks": 100,
        "blocks_per_cell": 100,
        "cells": CELLS,
    }
    routed = {
        "time": 1_700_000_000.0,
        "ingress": "def",
        "replica": "abc12345",
        "outcome": "hit",
        "prompt_tokens": 90,
        "predicted_tokens": 64,
        "best_tokens": 64,
        "queue_s": 0.1,
        "prefill_s": 0.02,
        "others_s": 0.01,
        "decode_s": 0.03,
        "next_s": 0.2,
    }
    return {"time": time.time(), "model": "fake", "replicas": [replica], "routed": [routed]} | changes


INFO = {
    "version": "0.1.0",
    "python": "3.11.7",
    "model": "fake",
    "config": {"task": "generate"},
    "engine": {"max_model_len": 2048, "num_blocks": 100, "block_size": 16},
}


class FakeServer:
    """Answers like a Pagoda whose model says "one two three".

    Attributes:
        answers: body by path of GET requests, or a status and a body.
        requests: paths and bodies of the POST requests so far.
        clients: addresses of the connections that have sent one.
        deltas: the parts of each answer; a list in it is sent as tool calls.
        status: of each answer to a POST.
        key: that requests must have; empty: none.
        pause_s: between two parts.
        at_once: parts per write: events that arrive together.
        breaks_off: whether streams end after their first write.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/server_info": INFO,
            "/v1/models": {"data": [{"id": "fake"}]},
            "/live": live(),
            "/load": {"server_load": 2},
        }
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.clients: set[tuple[str, int]] = set()
        self.deltas: list[list[Any]] = []
        self.status = 200
        self.key = ""
        self.pause_s = 0.0
        self.at_once = 1
        self.breaks_off = False
        self.url = ""

    def next_deltas(self) -> list[Any]:
        """Return the parts of the next answer."""
        return self.deltas.pop(0) if self.deltas else ["one", " two", " three"]


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run a fake server on a free port of this machine."""
    fake = FakeServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake)) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not self._is_allowed():
                return
            answer = fake.answers.get(self.path, (404, {"error": {"message": f"{self.path} does not exist"}}))
            self._send(*(answer if isinstance(answer, tuple) else (200, answer)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._is_allowed():
                return
            fake.requests.append((self.path, body))
            fake.clients.add(self.client_address)
            if fake.status != 200:
                self._send(fake.status, {"error": {"message": f"refused; ask for less than {body.get('max_tokens')}"}})
            elif body.get("stream"):
                self._stream(body)
            else:
                self._send(200, {"choices": [{"message": {"content": "one"}}], "usage": _usage(1)})

        def _is_allowed(self) -> bool:
            if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                self._send(401, {"error": {"message": "a key is required"}})
                return False
            return True

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            deltas, is_chat = fake.next_deltas(), "messages" in body
            events = [_event(delta, number, is_chat) for number, delta in enumerate(deltas)]
            events.append({"choices": [], "usage": _usage(len(deltas))})
            data = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
            for start in range(0, len(data), fake.at_once):
                chunk = b"".join(data[start : start + fake.at_once])
                try:
                    self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                except OSError:  # the client has gone
                    self.close_connection = True
                    return
                time.sleep(fake.pause_s)
                if fake.breaks_off:
                    self.close_connection = True
                    return
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def _event(delta: Any, number: int, is_chat: bool) -> dict[str, Any]:
    if is_chat:
        part = {"tool_calls": delta} if isinstance(delta, list) else {"content": delta}
        return {"choices": [{"index": 0, "delta": part}]}
    return {"choices": [{"index": 0, "text": delta, "token_ids": [100 + number]}]}


def _usage(completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 40,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 32},
    }

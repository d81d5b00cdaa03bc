"""HttpCall: sends a line to a server over HTTP, from a thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

from deployments.batch.in_process import Answer
from engine.errors import ConfigError

__all__ = ["HttpCall"]


class HttpCall:
    """A LineCall. What fails on the way becomes status 503, so that it is sent again.

    Args:
        url: of the server, with or without ``/v1``.
        key: the API key; empty for none.
        num_threads: calls at once.
        timeout_s: without a byte of an answer.

    Raises:
        ConfigError: the URL cannot be one.
    """

    def __init__(self, url: str, key: str, num_threads: int, timeout_s: float = 3600.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url='{url}' is not an address of a server; give one such as http://127.0.0.1:8000")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname, port)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="batch-http")
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()

    async def __call__(self, path: str, body: bytes, request_id: str, client: str) -> Answer:
        """Return the response to a POST request."""
        del client  # the server takes turns by address
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._send, path, body, request_id)

    def require_server(self) -> None:
        """Raise ConfigError unless the server can be reached."""
        connection = self._kind(*self._address, timeout=30.0)
        try:
            connection.request("GET", f"{self._prefix}/v1/models", headers=self._headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            host, port = self._address
            raise ConfigError(f"no server answers at {host}:{port} ({error}); start it, or change --url") from None
        finally:
            connection.close()
        if status in (401, 403):
            raise ConfigError("the server needs an API key; set OPENAI_API_KEY")

    def close(self) -> None:
        """End all calls."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # which ends a call in another thread
            connection.close()

    def _send(self, path: str, body: bytes, request_id: str) -> Answer:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._kind(*self._address, timeout=self._timeout_s)
            self._connections.add(connection)
        try:
            connection.request("POST", self._prefix + path, body, self._headers | {"X-Request-Id": request_id})
            response = connection.getresponse()
            answer = Answer(response.status, response.headers.get("X-Request-Id", request_id), response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return _failed(503, request_id, f"no answer from the server: {error}")
        return answer if _is_object(answer.body) else _failed(answer.status, request_id, "the answer is not JSON")


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def _failed(status: int, request_id: str, message: str) -> Answer:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return Answer(502 if status == 200 else status, request_id, json.dumps({"error": error}).encode())

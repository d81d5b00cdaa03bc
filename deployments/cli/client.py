"""ServerClient: a client of one server's HTTP API, with the standard library only, so that commands start at once."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deployments.launcher.direct import direct_urlopen
from engine.errors import ConfigError, PagodaError, shown

__all__ = ["Reply", "ServerClient", "ServerError", "base_url"]

OWN_HOSTS = ("localhost", "127.0.0.1", "::1")  # which no proxy reaches
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 600.0  # without a byte
EVENT, END = b"data: ", b"[DONE]"


class ServerError(PagodaError):
    """A server does not answer, or rejects a request. The message says what to do.

    Attributes:
        status: of HTTP; 0 if no answer came.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Reply(NamedTuple):
    """A whole answer."""

    body: bytes
    headers: Message

    def json(self) -> Any:
        """Return the body's JSON."""
        return json.loads(self.body)


class ServerClient:
    """Sends requests to one server. A proxy of the environment is used, but not for this machine.

    Args:
        url: with or without a scheme and ``/v1``; also the prefix of a route.
        key: API key, None if the server needs none.

    Raises:
        ConfigError: the URL is malformed.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = base_url(url)
        self.key = key
        is_own = urlsplit(self.url).hostname in OWN_HOSTS
        self._open = direct_urlopen if is_own else urllib.request.build_opener().open

    def get(self, path: str) -> Reply:
        """Return the answer to GET ``path``; raises ServerError if there is none, or its status is not 200."""
        with self._answer(path, None, TIMEOUT_S) as answer:
            return Reply(answer.read(), answer.headers)

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Return the answer to a POST of JSON; raises ServerError as ``get``."""
        with self._answer(path, body, STREAM_TIMEOUT_S) as answer:
            return Reply(answer.read(), answer.headers)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer as they come.

        Raises:
            ServerError: as ``get``, and if the stream has an error or ends early.
        """
        with self._answer(path, {**body, "stream": True}, STREAM_TIMEOUT_S) as answer:
            try:
                for line in answer:
                    if not line.startswith(EVENT):
                        continue
                    if line[len(EVENT) :].strip() == END:
                        return
                    event = json.loads(line[len(EVENT) :])
                    if "error" in event:
                        raise ServerError(str(event["error"].get("message", event["error"])))
                    yield event
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the answer broke off ({error or type(error).__name__}); ask again") from None
        raise ServerError("the answer broke off before its end; ask again")

    def _answer(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            return self._open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(self._rejection(path, error.code, error.read()), error.code) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            remedy = "start one with `pagoda serve`, or give the URL of another"
            raise ServerError(f"no server answers at {self.url} ({reason}); {remedy}") from None

    def _rejection(self, path: str, status: int, body: bytes) -> str:
        if status == 401:
            given = "the given API key is not one of its keys" if self.key else "it needs an API key"
            return f"{self.url}{path} answers 401: {given}; give --key, or set PAGODA_API_KEY"
        return f"{self.url}{path} answers {status}: {_message(body)}"


def base_url(url: str) -> str:
    """Return a URL without a slash or ``/v1`` at its end, and with a scheme.

    Raises:
        ConfigError: it is not the URL of an HTTP server.
    """
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_valid = False
    if not is_valid:
        remedy = "give one such as http://127.0.0.1:8000"
        raise ConfigError("is not the URL of a server", param="URL", value=url, remedy=remedy)
    return text.split("?")[0].rstrip("/").removesuffix("/v1").rstrip("/")


def _message(body: bytes) -> str:
    """Return the message of an error body of the OpenAI API, else the beginning of the body."""
    try:
        content = json.loads(body)
        return str(content["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return shown(body.decode(errors="replace").strip())

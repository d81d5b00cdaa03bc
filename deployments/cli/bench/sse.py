"""SseReader: reads the bytes of one HTTP answer as they come, and notes when its tokens arrived.

An event is decoded to the few fields that count, about a microsecond each, after its time was taken.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

__all__ = ["SseReader"]

_EVENT, _DONE = b"data: ", b"data: [DONE]"
_END_OF_HEAD = b"\r\n\r\n"
MAX_ERROR_BODY = 4096  # bytes that are kept


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class SseReader:
    """One answer.

    Attributes:
        status: of HTTP; 0 before the head has come.
        arrivals: times of the events with tokens, of the caller's clock.
        num_tokens: generated, as `usage` says, else as counted.
        token_ids: of the answer, if the server sends them.
        is_done: the answer has come to its end.
        keeps_alive: whether the connection may have another request after it.
        error: code of an error that the stream reports, else empty.
    """

    def __init__(self) -> None:
        self.status = 0
        self.arrivals = array("d")
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.is_done = False
        self.keeps_alive = True
        self.error = ""
        self.prompt_tokens = self.cached_tokens = 0
        self._completion_tokens = 0
        self._counted = 0
        self._head = b""
        self._rest = b""  # of the body: an event, or the frame of a chunk, that has not ended
        self._chunk: int | None = None  # bytes of the current chunk that are to come; None: its size is
        self._is_chunked = False
        self._left: int | None = None  # bytes of a whole body that are to come
        self._event = b""  # the begun event
        self._has_finished = False

    @property
    def num_tokens(self) -> int:
        """Generated tokens, as `usage` says, else as counted."""
        return self._completion_tokens or self._counted

    @property
    def is_complete(self) -> bool:
        """Whether the stream has ended as it should."""
        return self.is_done and self._has_finished and not self.error

    def feed(self, data: bytes, now: float) -> None:
        """Take what has come at that time."""
        if not self.status:
            head, end, data = (self._head + data).partition(_END_OF_HEAD)
            if not end:
                self._head = head
                return
            self._read_head(head)
        if self._is_chunked:
            self._dechunk(self._rest + data if self._rest else data, now)
        else:
            self._take(data, now)
            if self._left is not None:
                self._left -= len(data)
                self.is_done = self._left <= 0

    def end_of_connection(self) -> None:
        """Take that the server has closed the connection, which ends a body without a length."""
        self.keeps_alive = False
        if self.status and not self._is_chunked and self._left is None:
            self.is_done = True

    def _read_head(self, head: bytes) -> None:
        status, *fields = head.lower().split(b"\r\n")
        self.status = int(status.split(None, 2)[1])
        headers = {name.strip(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
        self._is_chunked = headers.get(b"transfer-encoding") == b"chunked"
        self._left = int(headers[b"content-length"]) if b"content-length" in headers else None
        self.is_done = self._left == 0
        self.keeps_alive = headers.get(b"connection") != b"close"

    def _dechunk(self, data: bytes, now: float) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._chunk is None:
                end = data.find(b"\r\n", at)
                if end < 0:
                    break
                self._chunk = int(data[at:end].partition(b";")[0], 16)
                at = end + 2
            if size - at < self._chunk + 2:  # also of the last one: its line break may come later
                break
            if not self._chunk:  # the last one; trailers are not expected
                self.is_done = True
                break
            self._take(data[at : at + self._chunk], now)
            at += self._chunk + 2
            self._chunk = None
        self._rest = data[at:] if not self.is_done else b""

    def _take(self, body: bytes, now: float) -> None:
        if self.status != 200:
            self._event = (self._event + body)[:MAX_ERROR_BODY]
            return
        *events, self._event = (self._event + body if self._event else body).split(b"\n\n")
        for event in events:
            if event.startswith(_DONE):
                self._has_finished = True
            elif event.startswith(_EVENT):
                self._read_event(event[len(_EVENT) :], now)

    def _read_event(self, data: bytes, now: float) -> None:
        event = _decode(data)
        if event.error is not None:
            is_object = isinstance(event.error, dict)
            self.error = str((event.error.get("code") or event.error.get("type")) if is_object else event.error)
        if event.usage is not None:
            self.prompt_tokens, self._completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        for choice in event.choices:
            if choice.token_ids:
                self.token_ids += choice.token_ids
            elif not (choice.text or _has_content(choice.delta)):
                continue
            self._counted += len(choice.token_ids or (0,))
            self.arrivals.append(now)
            if choice.delta is not None:
                self.text.append(choice.delta.content or "")

    @property
    def error_code(self) -> str:
        """Name of the failure; empty if the answer is complete."""
        if self.status and self.status != 200:
            return str(self.status)
        if self.error:
            return self.error
        return "" if self.is_complete else "incomplete"


def _has_content(delta: _Delta | None) -> bool:
    return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)

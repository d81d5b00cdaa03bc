"""ChunkWriter: the server-sent events of one streamed chat or completion response.

ResponseWriter says what is in a chunk. From a choice's second chunk on, only the fields that vary are encoded: the
others are part of a template, which is made from a chunk of ResponseWriter.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from deployments.api.json_response import encode_json
from deployments.api.openai.protocol import GenerationRequest, StreamOptions
from deployments.api.openai.response_writers import ResponseWriter
from deployments.api.writers import Usage
from deployments.errors import ApiError
from deployments.requests.generation import Delta, Generation

__all__ = ["ChunkWriter", "encode_event"]

DONE = b"data: [DONE]\n\n"
_MARK = uuid.uuid4().hex  # the start of a value that varies; no client can guess it
_VARYING = re.compile(f'"{_MARK}([a-z_]+)"')


def encode_event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {encode_json(body)}\n\n".encode()


class ChunkWriter:
    """Writes the events of one response.

    Args:
        writer: what the chunks contain.
        generations: one for each choice.
        body: which fields the client wants.
    """

    def __init__(self, writer: ResponseWriter, generations: Sequence[Generation], body: GenerationRequest) -> None:
        self._writer = writer
        self._generations = generations
        self._num_generated = body.num_generated
        options = body.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._continuous_usage = self._includes_usage and bool(options.continuous_usage_stats)
        self._has_logprobs = body.num_logprobs is not None
        self._has_token_ids = bool(body.return_token_ids)
        self._templates: dict[int, str | None] = {}  # of the choices that have had a chunk

    def chunk(self, delta: Delta) -> bytes:
        """Return the event of one delta."""
        if delta.index not in self._templates:
            self._templates[delta.index] = None
            return encode_event(self._chunk(delta, first=True))
        template = self._templates[delta.index]
        if template is None:
            template = self._templates[delta.index] = self._template(delta.index)
        return (template % self._varying(delta)).encode()

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self._generations)

    def end(self) -> bytes:
        """Return the events after the last chunk: the usage, if it is wanted, and the end."""
        usage = encode_event(self._writer.usage_chunk(self._usage())) if self._includes_usage else b""
        return usage + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the events of a stream that has failed."""
        return encode_event(error.body) + DONE

    def _varying(self, delta: Delta) -> dict[str, str]:
        """Return the JSON of the values that vary."""
        reason, stop = delta.finish_reason, delta.stop_reason
        varying = {
            "text": encode_basestring(delta.text),
            "finish_reason": "null" if reason is None else encode_json(reason),
            "stop_reason": "null" if stop is None else encode_json(stop),
        }
        if self._has_logprobs:
            varying["logprobs"] = encode_json(self._writer.logprobs(delta, self._generations[delta.index], first=False))
        if self._has_token_ids:
            varying["token_ids"] = encode_json(delta.token_ids)
        if self._continuous_usage:
            varying["usage"] = encode_json(self._usage_fields())
        return varying

    def _template(self, index: int) -> str:
        """Return a chunk of a choice as a format of what varies."""
        delta = Delta(index, _MARK + "text", [], _MARK + "finish_reason", _MARK + "stop_reason", logprobs=[])
        chunk = self._chunk(delta, first=False)
        choice = chunk["choices"][0]
        if self._has_logprobs:
            choice["logprobs"] = _MARK + "logprobs"
        if self._has_token_ids:
            choice["token_ids"] = _MARK + "token_ids"
        if self._continuous_usage:
            chunk["usage"] = _MARK + "usage"
        return "data: " + _VARYING.sub(r"%(\1)s", encode_json(chunk).replace("%", "%%")) + "\n\n"

    def _chunk(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        chunk = self._writer.delta_chunk(delta, self._generations[delta.index], first=first)
        if self._continuous_usage:
            chunk["usage"] = self._usage_fields()
        elif self._includes_usage:
            chunk["usage"] = None
        return chunk

    def _usage_fields(self) -> dict[str, Any]:
        return self._writer.usage_fields(self._usage())

    def _usage(self) -> Usage:
        return Usage.of(self._generations, self._num_generated)

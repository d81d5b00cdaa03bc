"""What a line's request has in addition to its body, what its answer becomes, and whether it is to be sent again."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from deployments.api.json_response import encode_json
from deployments.batch.in_process import Answer, LineCall
from deployments.batch.input_lines import line_id
from deployments.batch.journal import Record, Tokens
from deployments.large_json import decode_json
from deployments.requests.background_gate import BACKGROUND_PRIORITY

__all__ = ["ENDPOINTS", "MAX_ATTEMPTS", "final_answer", "record_of", "request_body"]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_ATTEMPTS = 5  # of a request that does not fail because the server is busy
_LAST_DELAY_S = 30.0


def request_body(endpoint: str, body: dict[str, Any]) -> bytes:
    """Return the body to send: with the priority of batches, and not stored in an ingress's memory."""
    own: dict[str, Any] = {"priority": BACKGROUND_PRIORITY}
    if endpoint == "/v1/responses":
        own["store"] = False
    return encode_json(body | own).encode(errors="backslashreplace")


async def final_answer(call: LineCall, endpoint: str, body: bytes, request_id: str, client: str) -> Answer:
    """Send a request until its answer is final: again when the server is busy, and a few times if it fails."""
    num_attempts = 0
    while True:
        answer = await call(endpoint, body, request_id, client)
        num_attempts += 1
        if not _is_temporary(answer, num_attempts):
            return answer
        await asyncio.sleep(_retry_delay_s(num_attempts))


def _is_temporary(answer: Answer, num_attempts: int) -> bool:
    if answer.status not in (408, 429, 499, 500, 502, 503, 504):
        return False
    is_busy = answer.status in (429, 502, 503, 504) and _error_code(answer.body) != "replica_lost"
    return is_busy or num_attempts < MAX_ATTEMPTS


def _retry_delay_s(num_attempts: int) -> float:
    return min(_LAST_DELAY_S, 0.5 * 2.0 ** min(num_attempts, 10)) * random.uniform(0.5, 1.0)


def record_of(batch_id: str, index: int, custom_id: str, answer: Answer) -> tuple[Record, str | None]:
    """Return the result of a line, and the model that its answer names."""
    content: dict[str, Any] = decode_json(answer.body)
    head = encode_json({"id": line_id(batch_id, index), "custom_id": custom_id})
    response = encode_json({"status_code": answer.status, "request_id": answer.request_id})
    text = b'%s,"response":%s,"body":%s},"error":null}' % (
        head[:-1].encode(errors="backslashreplace"),
        response[:-1].encode(),
        answer.body,
    )
    is_error = answer.status != 200
    tokens = Tokens() if is_error else _tokens(content.get("usage") or {})
    return Record(index, is_error, text, tokens), content.get("model")


def _error_code(body: bytes) -> str | None:
    try:
        code: str | None = json.loads(body)["error"]["code"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return code


def _tokens(usage: dict[str, Any]) -> Tokens:
    """Return the tokens of a usage in the form of chat and completions, or of responses."""
    prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Tokens(
        usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        prompt.get("cached_tokens") or 0,
        usage.get("completion_tokens", usage.get("output_tokens", 0)) or 0,
        completion.get("reasoning_tokens") or 0,
    )

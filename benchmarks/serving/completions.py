"""One streamed completion through HTTP, and its outcome for the client: times, tokens, and how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

__all__ = ["Outcome", "complete"]


@dataclass(slots=True)
class Outcome:
    """Times are seconds after the request was sent."""

    status: int
    sent: float  # on the client's clock
    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    arrivals_s: list[float] = field(default_factory=list)  # of each event with tokens

    @property
    def succeeded(self) -> bool:
        """Whether the answer is complete."""
        return self.status == 200 and not self.error


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Outcome:
    """Send a completion request and read its stream to the end."""
    outcome = Outcome(0, perf_counter())
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            outcome.status = answer.status
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    _read(json.loads(line[6:]), outcome)
    except aiohttp.ClientError as error:
        outcome.error = type(error).__name__
    outcome.total_s = perf_counter() - outcome.sent
    return outcome


def _read(event: dict[str, Any], outcome: Outcome) -> None:
    if "error" in event:
        outcome.error = str(event["error"]["code"])
    for choice in event.get("choices", ()):
        if choice["token_ids"]:
            outcome.arrivals_s.append(perf_counter() - outcome.sent)
            outcome.first_token_s = outcome.arrivals_s[0]
        outcome.tokens += len(choice["token_ids"])
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

"""One streamed completion through HTTP, and its outcome for the client: times, tokens, and how it ended.

The client is that of `pagoda bench`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deployments.cli.bench.http import HttpTarget

__all__ = ["Outcome", "complete", "connected"]


@dataclass(slots=True)
class Outcome:
    """Times are seconds after the request was sent."""

    status: int  # 0: the connection has failed
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


@contextmanager
def connected(url: str, timeout_s: float = 3600.0) -> Iterator[HttpTarget]:
    """Return the connections to a server: as many as requests run at once. Use it in an event loop."""
    target = HttpTarget(url, timeout_s=timeout_s)
    try:
        yield target
    finally:
        target.close()


async def complete(target: HttpTarget, body: dict[str, Any]) -> Outcome:
    """Send a completion request and read its stream to the end."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    seen = await target.send("/v1/completions", body)
    arrivals_s = [at - seen.sent_at for at in seen.arrivals]
    return Outcome(
        _status(seen.error),
        seen.sent_at,
        arrivals_s[0] if arrivals_s else 0.0,
        seen.e2e_s,
        seen.num_tokens,
        seen.prompt_tokens,
        seen.cached_tokens,
        seen.error,
        arrivals_s,
    )


def _status(error: str) -> int:
    """Return the status of HTTP that an outcome's error implies."""
    if error.isdigit():
        return int(error)
    return 0 if error == "timeout" or error.endswith("Error") else 200

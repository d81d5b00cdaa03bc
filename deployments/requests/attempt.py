"""Attempt: when one replica served one answer, for the log line and the spans.

Times are seconds of this process's monotonic clock. What the engine measures comes as durations, since the clocks of
two hosts differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from engine.outputs import EngineOutput, RequestTiming

__all__ = ["Attempt"]


@dataclass(slots=True)
class Attempt:
    """The time that one answer spent at one replica, or waiting for a replica."""

    started: float = field(default_factory=monotonic)
    chosen: float | None = None  # when our router chose the replica; None with another router
    replica: str = ""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None  # what the engine measured
    error: str = ""  # the type of the error that ended it

    def receive(self, output: EngineOutput) -> None:
        """Record the arrival of tokens."""
        now = monotonic()
        self.replica = output.replica
        if output.timing is not None:
            self.timing = output.timing
        if self.first_token is None:
            # Where all tokens arrive together, the first one is older by the time that the engine has decoded.
            decode_s = output.timing.decode_s if output.timing is not None else 0.0
            self.first_token = max(self.started, now - decode_s)
            self.num_cached_tokens = output.num_cached_tokens
        self.last_token = now
        self.num_tokens += len(output.token_ids)

    def end(self, replica: str, chosen: float | None) -> None:
        """Record the end, with the router's choice and its time."""
        self.ended = monotonic()
        self.replica = self.replica or replica
        self.chosen = chosen

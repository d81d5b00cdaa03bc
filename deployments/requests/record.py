"""RequestRecord: what one request for tokens was, and how it went, for its log line and its spans.

The ASGI middleware makes one when the request comes, those who serve it note what they learn, and when it has ended it
is read once. So nothing is formatted, and no span is made, while tokens flow. Times are seconds of this process's
monotonic clock; what a replica measures comes as durations, since clocks of two hosts differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.errors import ApiError
    from deployments.requests.generation import Generation

__all__ = ["OPERATIONS", "RequestRecord", "current_record", "note_error", "recording"]

CLIENT_CLOSED = 499  # what is logged, as nobody is left to be answered
# The paths whose records are told, and what OpenTelemetry calls what they do.
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request for tokens."""

    request_id: str
    path: str
    trace_context: Mapping[str, str] = field(default_factory=dict)  # the W3C headers that the caller sent
    started: float = field(default_factory=monotonic)
    started_ns: int = field(default_factory=time_ns)  # the same moment on the wall clock, in Unix nanoseconds
    ended: float = 0.0
    sent_status: int = 0  # 0 until the answer began
    is_complete: bool = False  # whether the answer's last byte was sent
    error: ApiError | None = None
    stream: bool = False
    seed: int | None = None  # as the client sent it
    num_answers: int = 1  # to each prompt
    num_draws: int = 1  # answers generated for each prompt, of which the best ``num_answers`` are returned
    generations: Sequence[Generation] = ()
    response_id: str = ""
    prompt: str | None = None  # only where it is to be logged

    @property
    def client_has_gone(self) -> bool:
        """Whether nobody has waited for the end."""
        return not self.is_complete or (self.error is not None and self.error.status == CLIENT_CLOSED)

    @property
    def status(self) -> int:
        """The HTTP status; of a stream that broke, the error's."""
        if self.client_has_gone:
            return CLIENT_CLOSED
        return self.error.status if self.error is not None else self.sent_status

    @property
    def finish_reasons(self) -> list[str]:
        """Why each answer ended, in order; those that did not end are left out."""
        return [one.finish_reason for one in self.generations if one.finish_reason is not None]

    @property
    def reason(self) -> str:
        """Why the request ended, in a word or two: the answers' reasons, ``abort``, or what was wrong."""
        if self.client_has_gone:
            return "abort"
        if self.error is not None:
            return self.error.code or ("refused" if self.error.status < 500 else "error")
        return "+".join(dict.fromkeys(self.finish_reasons)) or "none"

    @property
    def e2e_s(self) -> float:
        """Seconds from the request to the answer's last byte."""
        return self.ended - self.started

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request to the first token of any answer."""
        firsts = [one.first_token for g in self.generations for one in g.attempts if one.first_token is not None]
        return min(firsts) - self.started if firsts else None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once, however many answers it has."""
        return sum(len(one.prompt.token_ids) for one in self._one_a_prompt)

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that a prefix cache served."""
        return sum(one.num_cached_tokens for one in self._one_a_prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(one.token_ids) for one in self.generations)

    @property
    def num_migrations(self) -> int:
        """How often a replica was lost."""
        return sum(one.num_migrations for one in self.generations)

    @property
    def replica(self) -> str:
        """The last replica of the first answer, or an empty name."""
        attempts = self.generations[0].attempts if self.generations else ()
        return next((one.replica for one in reversed(attempts) if one.replica), "")

    @property
    def _one_a_prompt(self) -> Sequence[Generation]:
        return self.generations[:: self.num_draws]


_current: ContextVar[RequestRecord | None] = ContextVar("pagoda_request_record", default=None)


def recording(record: RequestRecord) -> None:
    """Make ``record`` the one of the request that this task serves."""
    _current.set(record)


def current_record() -> RequestRecord:
    """Return the record of the request that this task serves."""
    record = _current.get()
    assert record is not None
    return record


def note_error(error: ApiError) -> None:
    """Note what the client was told instead of an answer, or behind a part of one."""
    record = _current.get()
    if record is not None:
        record.error = error

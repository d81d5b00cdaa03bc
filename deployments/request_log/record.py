"""RequestRecord: the parameters, answers and end of one HTTP request for tokens, for its log line and its spans.

The ASGI middleware creates the record when a request arrives, the code that serves the request fills it in, and it is
read once at the end. So nothing is formatted, and no span is created, while tokens flow. Times are seconds of this
process's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import Task

    from deployments.errors import ApiError
    from deployments.transport.request_channel.dispatch import Dispatch
    from engine.sampling_params import SamplingParams

__all__ = [
    "CLIENT_CLOSED",
    "Answer",
    "RequestRecord",
    "current_record",
    "find_record",
    "record_error",
    "set_current_record",
]

CLIENT_CLOSED = 499  # the status that is logged; the client has disconnected and gets none, or has cancelled


class Answer(Protocol):
    """What the engines have computed for one prompt: generated text, or a vector or scores."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def params(self) -> SamplingParams | None: ...
    @property
    def attempts(self) -> Sequence[Dispatch]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_migrations(self) -> int: ...
    @property
    def finish_reason(self) -> str | None: ...


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request for tokens: its parameters, its answers, and how it ended."""

    request_id: str
    path: str
    client: str = ""  # the address that connected
    trace_context: Mapping[str, str] = field(default_factory=dict)  # the caller's W3C headers
    started: float = field(default_factory=monotonic)
    started_ns: int = field(default_factory=time_ns)  # the same moment on the wall clock, in Unix nanoseconds
    ended: float = 0.0
    sent_status: int = 0  # 0 until the response has started
    is_complete: bool = False  # the response's last byte was sent
    error: ApiError | None = None
    stream: bool = False
    seed: int | None = None  # as the client sent it
    num_answers: int = 1  # to each prompt
    num_generated: int = 1  # answers generated for each prompt, of which the best ``num_answers`` are returned
    generations: Sequence[Answer] = ()
    response_id: str = ""
    prompt: str | None = None  # the text to log, if prompts are logged
    background: Task[None] | None = None  # what answers the request after its response, if anything does

    @property
    def client_disconnected(self) -> bool:
        """Whether the client disconnected, or cancelled the request, before the end; it may leave a background one."""
        has_left = not self.is_complete and self.background is None
        return has_left or (self.error is not None and self.error.status == CLIENT_CLOSED)

    @property
    def status(self) -> int:
        """The HTTP status; for a stream that failed after its start, the error's."""
        if self.client_disconnected:
            return CLIENT_CLOSED
        return self.error.status if self.error is not None else self.sent_status

    @property
    def finish_reasons(self) -> list[str]:
        """Why each answer ended, in order, without the answers that did not end."""
        return [answer.finish_reason for answer in self.generations if answer.finish_reason is not None]

    @property
    def reason(self) -> str:
        """Why the request ended: the answers' finish reasons, ``abort``, or the kind of error."""
        if self.client_disconnected:
            return "abort"
        if self.error is not None:
            return self.error.code or ("refused" if self.error.status < 500 else "error")
        return "+".join(dict.fromkeys(self.finish_reasons)) or "none"

    @property
    def e2e_s(self) -> float:
        """Seconds from the request's arrival to the response's last byte."""
        return self.ended - self.started

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to the first token of any answer (TTFT)."""
        attempts = [attempt for answer in self.generations for attempt in answer.attempts]
        firsts = [attempt.first_token for attempt in attempts if attempt.first_token is not None]
        return min(firsts) - self.started if firsts else None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts. A prompt counts once, however many answers it has."""
        return sum(answer.num_prompt_tokens for answer in self._first_answers)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix cache served."""
        return sum(answer.num_cached_tokens for answer in self._first_answers)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.generations)

    @property
    def num_migrations(self) -> int:
        """Number of migrations to another replica."""
        return sum(answer.num_migrations for answer in self.generations)

    @property
    def replica(self) -> str:
        """The last replica of the first answer; empty if there was none."""
        attempts = self.generations[0].attempts if self.generations else ()
        return next((attempt.replica for attempt in reversed(attempts) if attempt.replica), "")

    def release(self) -> None:
        """Drop the prompts and answers, which are not read after the end.

        The HTTP server keeps the last request of each connection, and with it this record, until the next one comes:
        after a burst, thousands of prompts.
        """
        self.generations, self.prompt = (), None

    @property
    def _first_answers(self) -> Sequence[Answer]:
        """The first answer to each prompt."""
        return self.generations[:: self.num_generated]


_current: ContextVar[RequestRecord | None] = ContextVar("pagoda_request_record", default=None)


def set_current_record(record: RequestRecord) -> None:
    """Make ``record`` the current one of this task and its subtasks."""
    _current.set(record)


def current_record() -> RequestRecord:
    """Return the record of the request that this task serves. It exists below the middleware that creates it."""
    record = _current.get()
    assert record is not None
    return record


def find_record() -> RequestRecord | None:
    """Return the current record; None outside the middleware that creates it."""
    return _current.get()


def record_error(error: ApiError) -> None:
    """Put the error that the client gets, as the response or at the end of a stream, into the current record."""
    record = _current.get()
    if record is not None:
        record.error = error

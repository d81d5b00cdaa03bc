"""Dispatch: one attempt to get a request answered by a replica, from the moment it is sent or waits until it ends.

It is the only object of the attempt: the dispatcher, the link, the stall watch and the replica's load refer to it. It
holds what is asked, where it is, the outputs that have arrived and their times. It decides nothing: it knows neither
how a replica is chosen nor when an attempt is repeated.

``deadline``, ``stalls_at`` and ``wake_at`` are on the event loop's clock; the other times are seconds of this process's
monotonic clock. What the engine measures comes as durations, since the clocks of two hosts differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from engine.outputs import EngineOutput, RequestTiming
from engine.request import EngineRequest

__all__ = ["Dispatch"]

MAX_QUEUED_LOGPROBS = 8192  # about 150 bytes each, and some 5 microseconds of the event loop to write as JSON


@dataclass(slots=True, eq=False)
class Dispatch:
    """One request at one replica, or waiting for one, with the outputs that its reader has not taken.

    Queued outputs are joined, so that a slow reader gets them whole. What is queued is bounded, so that clients that
    read slowly or not at all neither fill the memory nor make chunks that hold up other streams: at most the rest of
    the answer, 40 bytes a token, and of log-probabilities about 1.2 MB, or one output. With more of them ``is_full`` is
    true, and the link pauses the dispatch: it aborts the request and calls ``fail`` with StreamPausedError.

    Attributes:
        request: the prompt, and the output tokens that other replicas have generated.
        block_hashes: of the full blocks of the prompt and of those output tokens.
        avoid: replicas that have just failed this request.
        handed_over_by: the replica that has just ended the request so that another one continues it, and that still
            holds all KV of it; empty if there is none.
        deadline: when the request times out.
        replica: the name of the replica; empty while the request waits for one.
        stream: the number of the request's stream in the link to its replica.
        sent_at: when the request was last sent to a replica; infinity before.
        num_uncached_tokens: tokens that the replica is predicted to compute before it generates the next one.
        routed: the entry in the list of recently routed requests.
        stalls_at: when the wait in progress becomes a stall.
        wake_at: when the reader is woken although nothing has arrived.
        watched_wait: the wait to which ``stalls_at`` and ``wake_at`` belong.
        started: when the attempt started.
        first_token, last_token, ended: when they came; None before.
        num_tokens: number of tokens taken.
        num_cached_tokens: prompt tokens found in the replica's prefix cache.
        timing: what the engine measured.
        error: the type of the error that ended the attempt.
        on_gap: called with the seconds between two arrivals of tokens.
        is_handed_over: its replica has ended it so that another one continues it.
    """

    request: EngineRequest
    block_hashes: Sequence[int] = ()
    avoid: Collection[str] = ()
    deadline: float = inf
    handed_over_by: str = ""

    replica: str = ""
    stream: int = 0
    sent_at: float = inf
    num_uncached_tokens: int = 0
    routed: object = None

    stalls_at: float = inf
    wake_at: float = inf
    watched_wait: int | None = None

    started: float = field(default_factory=monotonic)
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    error: str = ""
    is_handed_over: bool = False
    on_gap: Callable[[float], None] | None = None

    _outputs: list[EngineOutput] = field(init=False, default_factory=list)
    _token_ids: list[int] = field(init=False, default_factory=list)  # after ``_outputs``
    _num_logprobs: int = field(init=False, default=0)  # in ``_outputs``
    _last_num_cached_tokens: int = field(init=False, default=0)  # of ``_outputs``
    _num_taken: int = field(init=False, default=0)
    _failure: Exception | None = field(init=False, default=None)
    _waiter: asyncio.Future[None] | None = field(init=False, default=None)

    @property
    def streams_tokens(self) -> bool:
        """Whether tokens come one by one; those of a beam search come together at its end."""
        return not self.request.params.uses_beam_search

    @property
    def wait_in_progress(self) -> int | None:
        """Which output the reader waits for, as its number; None while it does not wait."""
        return None if self._waiter is None else self._num_taken

    @property
    def is_full(self) -> bool:
        """Whether the reader lags by more log-probabilities than are kept.

        A single output may have more, of the whole vocabulary: to wait for it is not to lag.
        """
        return self._num_logprobs > MAX_QUEUED_LOGPROBS and len(self._outputs) > 1

    # --- called by the link and the stall watch -----------------------------------------------------------------------

    def put_token(self, token_id: int) -> None:
        """Queue one token of answer 0."""
        self._token_ids.append(token_id)
        self.wake()

    def put(self, output: EngineOutput) -> None:
        """Queue an output."""
        self._flush_tokens()
        self._outputs.append(output)
        self._last_num_cached_tokens = output.num_cached_tokens
        if output.logprobs is not None:
            self._num_logprobs += sum(map(len, output.logprobs))
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the outputs with an error, after the queued ones; the first error counts."""
        if self._failure is None:
            self._failure = error
        self.wake()

    def wake(self) -> None:
        """End the reader's wait, whether or not anything has arrived."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- called by the reader, one at a time --------------------------------------------------------------------------

    async def next(self) -> EngineOutput | None:
        """Return all outputs of one answer that have arrived, as one, or None if none has for a second or so.

        Raises:
            Exception: that of ``fail``, once all outputs were taken. It is a ReplicaStalledError if the replica sends
                nothing for too long and has no queue that explains it, RequestTimeoutError at the deadline,
                EngineDeadError if the replica is lost, or what the replica has raised.
        """
        output = self.take()
        if output is None:
            await self.wait()
            output = self.take()
        if output is not None:
            self.record(output)
        return output

    def take(self) -> EngineOutput | None:
        """Return the queued outputs of one answer, joined; None if there are none.

        Raises:
            Exception: that of ``fail``, once all outputs were taken.
        """
        if not self._outputs:
            if self._token_ids:
                self._num_taken += 1
                return self._take_tokens()
            if self._failure is not None:
                raise self._failure
            return None
        self._num_taken += 1
        self._flush_tokens()
        index = self._outputs[0].index
        taken = [output for output in self._outputs if output.index == index]
        self._outputs = [output for output in self._outputs if output.index != index]
        if self._num_logprobs:
            self._num_logprobs = sum(len(position) for output in self._outputs for position in output.logprobs or ())
        return taken[0] if len(taken) == 1 else EngineOutput.join(taken, self.replica)

    async def wait(self) -> None:
        """Wait until ``take`` returns an output or raises, or for ``wake``."""
        if self._outputs or self._token_ids or self._failure is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def record(self, output: EngineOutput) -> None:
        """Record when tokens were taken."""
        now = monotonic()
        if output.timing is not None:
            self.timing = output.timing
        if self.first_token is None:
            # Where all tokens arrive together, the first one is older by the time that the engine has decoded.
            decode_s = output.timing.decode_s if output.timing is not None else 0.0
            self.first_token = max(self.started, now - decode_s)
            self.num_cached_tokens = output.num_cached_tokens
        elif self.on_gap is not None and self.last_token is not None:
            self.on_gap(now - self.last_token)
        self.last_token = now
        self.num_tokens += len(output.token_ids)

    def forget_failure(self) -> None:
        """Drop the error, whose traceback refers to the reader: the reader keeps this object, and has what it needs."""
        self._failure = None

    def _take_tokens(self) -> EngineOutput:
        token_ids, self._token_ids = self._token_ids, []
        return EngineOutput(
            self.request.request_id,
            0,
            token_ids,
            num_cached_tokens=self._last_num_cached_tokens,
            replica=self.replica,
        )

    def _flush_tokens(self) -> None:
        if self._token_ids:
            self._outputs.append(self._take_tokens())

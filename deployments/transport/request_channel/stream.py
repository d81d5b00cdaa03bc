"""ReplicaStream: the outputs of one request, from their arrival at the ingress until its reader takes them."""

from __future__ import annotations

import asyncio

from engine.outputs import EngineOutput

__all__ = ["ReplicaStream"]


MAX_QUEUED_LOGPROBS = 8192  # about 150 bytes each, and some 5 microseconds of the event loop to write as JSON


class ReplicaStream:
    """What a replica has sent for a request and the reader has not taken: joined, so that a slow reader gets it whole.

    What is kept is bounded, so that clients that read slowly or not at all neither fill the memory nor make chunks
    that hold up other streams: at most the rest of the answer, 40 bytes a token, and of log-probabilities about 1.2 MB.
    With more of them the stream ``is_full``, and the link pauses it: it aborts the request and fails the stream with
    StreamPausedError.

    Attributes:
        request_id: of the request.
        replica: the name of the replica; empty until the request was sent to one.
    """

    __slots__ = (
        "_error",
        "_num_cached_tokens",
        "_num_logprobs",
        "_num_taken",
        "_outputs",
        "_token_ids",
        "_waiter",
        "replica",
        "request_id",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.replica = ""
        self._outputs: list[EngineOutput] = []
        self._token_ids: list[int] = []  # after ``_outputs``
        self._num_cached_tokens = 0
        self._num_logprobs = 0  # in ``_outputs``
        self._num_taken = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def wait_in_progress(self) -> int | None:
        """Which output the reader waits for, as its number; None while it does not wait."""
        return None if self._waiter is None else self._num_taken

    @property
    def is_full(self) -> bool:
        """Whether the reader lags by more log-probabilities than are kept."""
        return self._num_logprobs > MAX_QUEUED_LOGPROBS

    # --- called by the link -----------------------------------------------------------------------------------------

    def put_token(self, token_id: int) -> None:
        """Queue one token of answer 0."""
        self._token_ids.append(token_id)
        if self._waiter is not None:
            self._wake(self._waiter)

    def put(self, output: EngineOutput) -> None:
        """Queue an output."""
        self._flush_tokens()
        self._outputs.append(output)
        self._num_cached_tokens = output.num_cached_tokens
        if output.logprobs is not None:
            self._num_logprobs += sum(map(len, output.logprobs))
        if self._waiter is not None:
            self._wake(self._waiter)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the queued outputs; the first error counts."""
        if self._error is None:
            self._error = error
        if self._waiter is not None:
            self._wake(self._waiter)

    def nudge(self) -> None:
        """End the reader's wait although nothing has come."""
        if self._waiter is not None:
            self._wake(self._waiter)

    # --- called by the reader ---------------------------------------------------------------------------------------

    def take(self) -> EngineOutput | None:
        """Return the queued outputs of one answer, joined; None if there are none.

        Raises:
            Exception: the error of ``fail``, once all outputs were taken.
        """
        if not self._outputs:
            if self._token_ids:
                self._num_taken += 1
                return self._take_tokens()
            if self._error is not None:
                raise self._error
            return None
        self._num_taken += 1
        self._flush_tokens()
        index = self._outputs[0].index
        taken = [output for output in self._outputs if output.index == index]
        self._outputs = [output for output in self._outputs if output.index != index]
        if self._num_logprobs:
            self._num_logprobs = sum(len(one) for output in self._outputs for one in output.logprobs or ())
        return taken[0] if len(taken) == 1 else EngineOutput.join(taken, self.replica)

    async def wait(self) -> None:
        """Wait until ``take`` returns an output or raises, or for ``nudge``. One reader waits at a time."""
        if self._outputs or self._token_ids or self._error is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take_tokens(self) -> EngineOutput:
        token_ids, self._token_ids = self._token_ids, []
        return EngineOutput(
            self.request_id, 0, token_ids, num_cached_tokens=self._num_cached_tokens, replica=self.replica
        )

    def _flush_tokens(self) -> None:
        if self._token_ids:
            self._outputs.append(self._take_tokens())

    @staticmethod
    def _wake(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

"""PooledText: one text, or a pair, from the request to an engine to its vector or scores.

When its replica dies, stalls or is drained, another one computes it. It knows nothing of HTTP.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from msgspec.structs import replace

from deployments.errors import UnusableOutputError
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.retries import Retries
from deployments.transport.request_channel.dispatch import Dispatch
from engine.outputs import FinishReason
from engine.pooling.params import PoolingParams
from engine.request import EngineRequest

__all__ = ["PooledText", "TextTokens"]


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of a text, or a pair, and what is wanted of them.

    An array, since a list takes nine times the memory and, for a request of millions of tokens, a hundredth of a second
    to free.
    """

    token_ids: array[int]  # int32
    params: PoolingParams


class PooledText:
    """One text of a request for embeddings or scores.

    Args:
        dispatcher: sends requests to replicas.
        text: the tokens, and what is wanted of them.
        request: its other fields.
        max_migrations: how many lost replicas it survives.

    Attributes:
        attempts: to get it computed.
        finish_reason: set when it has been computed.
        replica: the one that has computed it.
    """

    params = None  # nothing is sampled
    num_cached_tokens = 0  # nothing is cached
    token_ids: tuple[int, ...] = ()  # nothing is generated

    def __init__(self, dispatcher: Dispatcher, text: TextTokens, request: EngineRequest, max_migrations: int) -> None:
        self._dispatcher = dispatcher
        self._text = text
        self._request = request
        self._retries = Retries(request.request_id, max_migrations)
        self.attempts: list[Dispatch] = []
        self.finish_reason: str | None = None
        self.replica = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens."""
        return len(self._text.token_ids)

    @property
    def num_migrations(self) -> int:
        """Number of migrations to another replica."""
        return self._retries.num_migrations

    async def result(self, deadline: float) -> bytes:
        """Return the vector or the scores, little-endian float32. Cancelling the call aborts the request.

        Args:
            deadline: when the request times out, on the event loop's clock.

        Raises:
            ReplicasLostError: after more than ``max_migrations`` lost replicas.
            OverloadedError: if the replicas that were tried are full.
            RequestTimeoutError: at the deadline.
            RequestError: if an engine rejects the request as invalid.
            UnusableOutputError: if the model's output is not finite.
        """
        while True:
            dispatch = self._send(deadline)
            try:
                while (output := await dispatch.next()) is None:
                    pass
            except Exception as error:
                self._retries.prepare(dispatch, error)
                continue
            finally:
                self._dispatcher.end(dispatch)
                dispatch.forget_failure()
                dispatch.request = self._request  # without the tokens
            self.replica, self.finish_reason = output.replica, output.finish_reason
            if output.finish_reason is FinishReason.ABORT or output.pooled is None:
                raise UnusableOutputError(str(output.stop_reason))
            return output.pooled

    def _send(self, deadline: float) -> Dispatch:
        request_id = self._request.request_id
        if self._retries:
            request_id = f"{request_id}-{len(self._retries)}"
        request = replace(
            self._request,
            request_id=request_id,
            prompt_token_ids=self._text.token_ids.tolist(),
            pooling=self._text.params,
        )
        dispatch = self._dispatcher.send(request, (), avoid=list(self._retries.avoid), deadline=deadline)
        self.attempts.append(dispatch)
        return dispatch

"""Generation: one answer's way through the engines, from the ingress's side.

It sends the prompt to a replica, turns the tokens that come back into text, ends at a stop string, and holds every
token and log-probability it has received: when a replica dies it sends the same request with these tokens to another
one, and the text goes on as it would have, no token lost and none twice. It knows nothing of HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from deployments.errors import is_replica_loss, unwrap
from deployments.prompts import Prompt
from deployments.replica import EngineOutput, EngineRequest
from deployments.telemetry import REQUEST_MIGRATIONS, ingress_recorder
from engine.errors import EngineDeadError
from engine.logprobs import TokenLogprobs
from engine.text import TextStream

__all__ = ["Delta", "Dispatch", "Generation"]

logger = logging.getLogger("ray.serve")


class Dispatch(Protocol):
    """Sends a request to one of the engines and returns what streams back."""

    def __call__(self, request: EngineRequest, *, block_hashes: list[int], avoid: list[str]) -> Any:
        """Return an async iterable of EngineOutput with a ``cancel`` method."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one batch of tokens adds to an answer."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if asked for


class Generation:
    """One answer to one prompt as it grows.

    Args:
        dispatch: how to reach the engines.
        request: the prompt and its parameters, for a single answer.
        prompt: for its block hashes.
        text: turns tokens into text.
        is_empty: only the prompt matters: the token that the engine must generate is dropped.
        max_migrations: how many lost replicas are survived.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        request: EngineRequest,
        prompt: Prompt,
        text: TextStream,
        *,
        is_empty: bool = False,
        max_migrations: int = 3,
    ) -> None:
        self._dispatch = dispatch
        self._request = request
        self._text = text
        self._is_empty = is_empty
        self._max_migrations = max_migrations
        self._avoid: list[str] = []
        self._num_migrations = 0
        self.prompt = prompt
        self.replica = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of token_ids, if asked for
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # if asked for; the first token has none
        self.num_cached_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """What best_of ranks by: the answer's log-probability a token. An answer without tokens comes last."""
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        total = sum(logprobs[token_id].logprob for token_id, logprobs in pairs)
        return total / len(self.token_ids) if self.token_ids else float("-inf")

    @property
    def num_logprobs(self) -> int:
        """How many log-probabilities it holds, of the answer and of the prompt."""
        return sum(map(len, self.logprobs)) + sum(len(one) for one in self.prompt_logprobs or () if one is not None)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the answer piece by piece; the last one has a finish_reason."""
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                delta = self._receive(output)
                yield delta
                if delta.finish_reason is not None:
                    return

    def _receive(self, output: EngineOutput) -> Delta:
        batch = output.batch
        if not self.token_ids:
            self.num_cached_tokens = batch.num_cached_tokens
        self.replica = output.replica
        if batch.prompt_logprobs is not None:
            self.prompt_logprobs = batch.prompt_logprobs
        if self._is_empty:
            return Delta("", [], "length", logprobs=None if batch.logprobs is None else [])
        text = self._text.push(batch.token_ids, final=batch.finish_reason is not None)
        token_ids, logprobs = batch.token_ids, batch.logprobs
        finish_reason, stop_reason = batch.finish_reason, batch.stop_reason
        if self._text.stop_string is not None:
            # However many tokens came at once, those behind the stop string are not the client's.
            kept = self._text.num_tokens - len(self.token_ids)
            token_ids, logprobs = token_ids[:kept], None if logprobs is None else logprobs[:kept]
            finish_reason, stop_reason = "stop", self._text.stop_string
        self.token_ids += token_ids
        self.logprobs += logprobs or ()
        return Delta(text, token_ids, finish_reason, stop_reason, logprobs)

    async def _outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """Yield what the engines send, from another replica if the first is lost."""
        for migrations in count():
            self.replica = ""
            responses = self._dispatch(
                self._remaining_request(), block_hashes=self.prompt.block_hashes, avoid=list(self._avoid)
            )
            try:
                async for output in responses:
                    yield output
                raise EngineDeadError("the replica ended the stream without a reason")
            except Exception as error:
                if not is_replica_loss(error) or migrations >= self._max_migrations:
                    raise
                self._lost(getattr(unwrap(error), "replica", "") or self.replica)
            finally:
                responses.cancel()

    def _lost(self, replica: str) -> None:
        """Remember a lost replica, if its name is known."""
        if replica and replica not in self._avoid:
            self._avoid.append(replica)
        self._num_migrations += 1
        ingress_recorder().increment(REQUEST_MIGRATIONS)
        logger.warning("replica %s was lost; its request goes on elsewhere", replica or "(unknown)")

    def _remaining_request(self) -> EngineRequest:
        """Return the request with what has been received so far, for an engine to go on behind."""
        if not self._num_migrations:
            return self._request
        params = self._request.params
        return replace(
            self._request,
            request_id=f"{self._request.request_id}-{self._num_migrations}",
            params=replace(params, prompt_logprobs=None)
            if self.token_ids
            else params,  # they came with the first token
            output_token_ids=list(self.token_ids),
        )

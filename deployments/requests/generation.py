"""Generation: one answer's way through the engines, from the ingress's side.

It sends the prompt to a replica, turns the tokens that come back into text, ends at a stop string, and holds every
token and log-probability it has received: when a replica dies, hangs or is drained it sends the same request with
these tokens to another one, and the text goes on as it would have, no token lost and none twice. It knows nothing of
HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from deployments.errors import ApiError, is_replica_loss, unwrap
from deployments.observability.ingress_metrics import REQUEST_MIGRATIONS, ingress_recorder
from deployments.requests.attempt import Attempt
from deployments.requests.engine_client import AttemptError, EngineClient
from deployments.requests.prompt import Prompt
from engine.errors import OverloadedError
from engine.outputs import EngineOutput, FinishReason, TokenLogprobs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream

__all__ = ["Delta", "Generation"]

logger = logging.getLogger("ray.serve")


MAX_REFUSALS = 1  # full replicas after which one more is tried before the client is told


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
        engines: how to reach them.
        request: the prompt and its parameters, for a single answer.
        prompt: for its block hashes.
        text: turns tokens into text.
        is_empty: only the prompt matters: the token that the engine must generate is dropped.
        max_migrations: how many lost replicas are survived.
    """

    def __init__(
        self,
        engines: EngineClient,
        request: EngineRequest,
        prompt: Prompt,
        text: TextStream,
        *,
        is_empty: bool = False,
        max_migrations: int = 3,
    ) -> None:
        self._engines = engines
        self._request = request
        self._text = text
        self._is_empty = is_empty
        self._max_migrations = max_migrations
        self._avoid: list[str] = []
        self._num_attempts = 0
        self.num_migrations = 0
        self.attempts: list[Attempt] = []
        self.prompt = prompt
        self.replica = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of token_ids, if asked for
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # if asked for; the first token has none
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self._request.params

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
                self.finish_reason = delta.finish_reason
                yield delta
                if delta.finish_reason is not None:
                    return

    def _receive(self, output: EngineOutput) -> Delta:
        if not self.token_ids:
            self.num_cached_tokens = output.num_cached_tokens
        self.replica = output.replica
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._is_empty:
            return Delta("", [], "length", logprobs=None if output.logprobs is None else [])
        text = self._text.push(output.token_ids, final=output.finish_reason is not None)
        token_ids, logprobs = output.token_ids, output.logprobs
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if self._text.stop_string is not None:
            # However many tokens came at once, those behind the stop string are not the client's.
            kept = self._text.num_tokens - len(self.token_ids)
            token_ids, logprobs = token_ids[:kept], None if logprobs is None else logprobs[:kept]
            finish_reason, stop_reason = FinishReason.STOP, self._text.stop_string
        self.token_ids += token_ids
        self.logprobs += logprobs or ()
        return Delta(text, token_ids, finish_reason, stop_reason, logprobs)

    async def _outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """Yield what the engines send, from another replica if one is lost or full."""
        deadline = asyncio.get_running_loop().time() + self._engines.request_timeout_s
        while True:
            request, self.replica = self._remaining_request(), ""
            hashes, avoid, attempt = self.prompt.block_hashes, list(self._avoid), Attempt()
            self.attempts.append(attempt)
            received = self._engines.outputs(request, hashes, avoid=avoid, deadline=deadline, attempt=attempt)
            try:
                async with aclosing(received) as outputs:
                    async for output in outputs:
                        yield output
            except AttemptError as failure:
                attempt.replica, attempt.error = failure.replica, type(unwrap(failure.cause)).__name__
                self._consider(failure.cause, failure.replica)

    def _consider(self, error: Exception, replica: str) -> None:
        """Return if another replica may do better than the one that ended with ``error``; else raise."""
        self._num_attempts += 1
        if isinstance(unwrap(error), OverloadedError):
            if not replica or replica in self._avoid or self._num_attempts - self.num_migrations > MAX_REFUSALS:
                raise error
        elif not is_replica_loss(error):
            raise error
        elif self.num_migrations >= self._max_migrations:
            raise ApiError(
                503,
                f"{self.num_migrations + 1} replicas were lost while they served this request; try again",
                code="replica_lost",
                retry_after_s=1,
            ) from error
        else:
            self.num_migrations += 1
            ingress_recorder().increment(REQUEST_MIGRATIONS)
            logger.warning("replica %s was lost (%s); its request goes on elsewhere", replica or "(unknown)", error)
        if replica and replica not in self._avoid:
            self._avoid.append(replica)

    def _remaining_request(self) -> EngineRequest:
        """Return the request with what has been received so far, for an engine to go on behind."""
        if not self._num_attempts:
            return self._request
        params = self._request.params
        if self.token_ids and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they came with the first token
        return replace(
            self._request,
            request_id=f"{self._request.request_id}-{self._num_attempts}",
            params=params,
            output_token_ids=list(self.token_ids),
        )

"""Generation: one answer to one prompt, from the first request to an engine to the last piece of text.

It sends the prompt to a replica, detokenises the tokens that come back, and ends at a stop string. It keeps every
token: when a replica dies, stalls or is drained, it sends the prompt and the tokens to another replica, and the answer
continues with no token lost and none twice. So does an answer that was paused because its client reads too slowly. It
knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from deployments.requests.dispatcher import Dispatcher
from deployments.requests.prompt import Prompt
from deployments.requests.retries import Retries
from deployments.requests.stream_blocks import StreamBlocks
from deployments.transport.request_channel.dispatch import Dispatch
from engine.outputs import EngineOutput, FinishReason, TokenLogprobs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream

__all__ = ["Delta", "Generation"]

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Delta:
    """The text that one batch of tokens adds to an answer."""

    index: int  # of the answer within its request
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # set on the last delta
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if requested


class Generation:
    """One answer to one prompt: its tokens, text, replicas and finish reason.

    Args:
        dispatcher: sends requests to replicas.
        request: the prompt and its parameters, for a single answer.
        prompt: the same prompt with its block hashes.
        text: turns tokens into text and finds stop strings.
        index: of this answer within its HTTP request.
        prompt_only: drop the one token that the engine must generate; the client wants the prompt's log-probabilities.
        max_migrations: how many lost replicas the answer survives.
        keeps_logprobs: keep the log-probabilities of all tokens, for a whole response; a stream's are in its deltas,
            and those of a long answer take 100 MB.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: EngineRequest,
        prompt: Prompt,
        text: TextStream,
        *,
        index: int = 0,
        prompt_only: bool = False,
        max_migrations: int = 3,
        keeps_logprobs: bool = True,
    ) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._text = text
        self._prompt_only = prompt_only
        self._keeps_logprobs = keeps_logprobs
        self._retries = Retries(request.request_id, max_migrations)
        self._blocks = StreamBlocks(prompt)
        self._copy_at = inf  # length of the answer at which a neighbour is to copy its KV
        self.attempts: list[Dispatch] = []
        self.index = index
        self.prompt = prompt
        self.replica = ""  # the replica of the last tokens, or the one that is to send the first
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of token_ids, if requested and kept
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None  # if requested; the first token has none
        self.num_cached_tokens = 0
        self.num_accepted_predicted = self.num_rejected_predicted = 0  # tokens of the request's prediction
        self.finish_reason: str | None = None

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self._request.params

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def num_migrations(self) -> int:
        """Number of migrations to another replica."""
        return self._retries.num_migrations

    @property
    def mean_logprob(self) -> float:
        """The answer's log-probability per token, by which ``best_of`` ranks; an answer without tokens ranks last."""
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        total = sum(logprobs[token_id].logprob for token_id, logprobs in pairs)
        return total / len(self.token_ids) if self.token_ids else float("-inf")

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities held, of the answer and of the prompt."""
        of_prompt = sum(len(position) for position in self.prompt_logprobs or () if position is not None)
        return sum(map(len, self.logprobs)) + of_prompt

    async def deltas(self) -> AsyncGenerator[Delta | None, None]:
        """Yield the answer piece by piece; the last delta has a finish_reason. Closing the generator aborts the answer.

        None comes about once a second while there are no tokens: a stream's client may have gone away.

        Raises:
            ReplicasLostError: after more than ``max_migrations`` lost replicas.
            OverloadedError: if the replicas that were tried are full.
            RequestTimeoutError: if the answer takes too long.
            RequestError: if an engine rejects the request as invalid.
        """
        deadline = asyncio.get_running_loop().time() + self._dispatcher.request_timeout_s
        while not self._has_ended:
            dispatch = self._send(deadline)
            try:
                while not self._has_ended:
                    output = await dispatch.next()
                    if output is None:
                        self.replica = self.replica or dispatch.replica
                    yield None if output is None else self._receive(output)
                    if len(self.token_ids) >= self._copy_at and not self._has_ended:
                        self._copy(dispatch)
            except Exception as error:
                self._retries.prepare(dispatch, error)
            finally:
                self._dispatcher.end(dispatch)
                dispatch.forget_failure()
                dispatch.request = self._request  # without its copy of the tokens: a long answer may pause often

    @property
    def _has_ended(self) -> bool:
        return self.finish_reason is not None

    def _send(self, deadline: float) -> Dispatch:
        """Send the prompt, and the tokens received so far, to a replica."""
        self.replica = ""
        dispatch = self._dispatcher.send(
            self._remaining_request(),
            list(self._blocks.hashes(self.token_ids)),  # the other one grows with the answer
            avoid=list(self._retries.avoid),
            deadline=deadline,
            handed_over_by=self._retries.handed_over_by,
        )
        self.attempts.append(dispatch)
        self._copy_at = self._dispatcher.replication.first_at(dispatch)
        return dispatch

    def _copy(self, dispatch: Dispatch) -> None:
        """Let a neighbour copy the answer's KV. It is a hint, whose failure must not be the answer's."""
        try:
            hashes = self._blocks.hashes(self.token_ids)
            self._copy_at = self._dispatcher.copy(dispatch, hashes, self.token_ids)
        except Exception:
            self._copy_at = inf
            logger.exception("the KV of %s is copied no further", dispatch.request.request_id)

    def _remaining_request(self) -> EngineRequest:
        """Return the request with the tokens received so far, which the engine continues."""
        if not self._retries:
            return self._request
        params = self._request.params
        if self.token_ids and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they came with the first token
        return replace(
            self._request,
            request_id=f"{self._request.request_id}-{len(self._retries)}",
            params=params,
            output_token_ids=list(self.token_ids),
        )

    def _receive(self, output: EngineOutput) -> Delta:
        """Keep an output's tokens and return their text."""
        if not self.token_ids:
            self.num_cached_tokens = output.num_cached_tokens
        self.replica = output.replica
        self.num_accepted_predicted += output.num_accepted_predicted
        self.num_rejected_predicted += output.num_rejected_predicted
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._prompt_only:
            delta = Delta(self.index, "", [], "length", logprobs=None if output.logprobs is None else [])
        else:
            delta = self._detokenise(output)
        self.token_ids += delta.token_ids
        if self._keeps_logprobs:
            self.logprobs += delta.logprobs or ()
        self.finish_reason = delta.finish_reason
        return delta

    def _detokenise(self, output: EngineOutput) -> Delta:
        text = self._text.push(output.token_ids, final=output.finish_reason is not None)
        delta = Delta(self.index, text, output.token_ids, output.finish_reason, output.stop_reason, output.logprobs)
        if self._text.stop_string is not None:
            # An output may hold tokens after the stop string, which the client does not get.
            kept = self._text.num_tokens - len(self.token_ids)
            delta.token_ids = output.token_ids[:kept]
            delta.logprobs = None if output.logprobs is None else output.logprobs[:kept]
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, self._text.stop_string
        return delta

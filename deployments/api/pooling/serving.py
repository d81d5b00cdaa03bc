"""PoolingServing: from the checked body of a request for embeddings or scores to the results of its texts.

Each text is a request to an engine of its own: the router spreads them over replicas, a lost replica loses none, and a
client that disconnects cancels those that are not computed. It knows neither HTTP bodies nor JSON.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.pooling.protocol import TextRequest
from deployments.api.pooling.texts import TextBuilder
from deployments.api.queue_limits import check_queue_limits
from deployments.config import AppConfig
from deployments.errors import ApiError
from deployments.request_log.log import RequestLog
from deployments.request_log.record import current_record
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.pooled_text import PooledText, TextTokens
from engine.errors import RequestError
from engine.pooling.info import PoolingTask
from engine.request import EngineRequest

__all__ = ["Pooled", "PoolingServing"]

TEXTS_AT_ONCE = 128  # that are prepared before other requests get their turns: about a millisecond
MAX_IN_FLIGHT = 64  # texts of one HTTP request at the engines: several batches, and no flood of their queues

_ENDPOINTS = {
    "generate": "POST /v1/chat/completions or /v1/completions",
    "embed": "POST /v1/embeddings",
    "score": "POST /v1/rerank or /v1/score",
}


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of one request.

    Attributes:
        response_id: of the response, after a prefix of its kind.
        created: Unix seconds.
        results: of each text, little-endian float32.
        num_tokens: of all texts.
        replica: that has computed the first text.
    """

    response_id: str
    created: int
    results: list[bytes]
    num_tokens: int
    replica: str


class PoolingServing:
    """Answers requests for embeddings and scores.

    Args:
        config: the application's configuration.
        dispatcher: sends requests to the engine replicas, and knows how much is queued.
        prompts: loads the tokenizer.
        log: how much of a text is logged.

    Attributes:
        model: the served name.
    """

    def __init__(self, config: AppConfig, dispatcher: Dispatcher, prompts: LazyPromptBuilder, log: RequestLog) -> None:
        self.model = config.served_name
        self._task = config.task
        self._limits = config.limits
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._log = log
        self._builder: TextBuilder | None = None

    async def builder_for(self, body: TextRequest, task: PoolingTask, num_texts: int, param: str) -> TextBuilder:
        """Return what tokenises a body, if the request can be served.

        Args:
            body: the request.
            task: that the server must have.
            num_texts: texts of the body.
            param: the field that holds them.

        Raises:
            ApiError: 404 for another model, 400 for a server with another task, 503 while too much is queued or the
                engines load.
            RequestError: if there are no texts, or too many.
        """
        if body.model is not None and body.model != self.model:
            problem = f"model '{body.model[:80]}' is not served; choose '{self.model}'"
            raise ApiError(404, problem, param="model", code="model_not_found")
        if self._task != task:
            raise ApiError(
                400,
                f"model '{self.model}' is served with task: {self._task}, and this endpoint needs task: {task}; use "
                f"{_ENDPOINTS[self._task]}",
                param="model",
                code="wrong_task",
            )
        if not num_texts:
            raise RequestError("is empty", param=param, value=[], remedy="give at least one text")
        if num_texts > (limit := self._limits.max_texts_per_request):
            raise RequestError(f"has {num_texts} texts", param=param, remedy=f"give at most {limit}")
        check_queue_limits(self._dispatcher, self._limits, body.priority)
        builder = await self._prompts.get()
        if self._builder is None:
            self._builder = TextBuilder(builder, self.model)
        return self._builder

    async def compute(self, texts: Sequence[TextTokens], body: TextRequest) -> Pooled:
        """Return the results of all texts.

        Raises:
            Exception: that of the first text that fails; the others are cancelled.
        """
        record = current_record()
        created = int(time.time())
        turn = f"{record.client} {record.request_id}"  # texts of several requests are computed in turns
        pooled: list[PooledText] = []
        for text in texts:
            if len(pooled) % TEXTS_AT_ONCE == TEXTS_AT_ONCE - 1:
                await asyncio.sleep(0)
            request = EngineRequest(uuid.uuid4().hex, [], priority=body.priority, client=turn)
            pooled.append(PooledText(self._dispatcher, text, request, self._limits.max_migrations))
        record.response_id, record.generations = record.request_id, pooled
        record.prompt = self._log.prompt((await self._prompts.get()).tokenizer, texts[0].token_ids)
        results = await self._results(pooled)
        return Pooled(record.request_id, created, results, record.num_prompt_tokens, pooled[0].replica)

    async def _results(self, texts: Sequence[PooledText]) -> list[bytes]:
        deadline = asyncio.get_running_loop().time() + self._dispatcher.request_timeout_s
        results = [b""] * len(texts)
        remaining = iter(enumerate(texts))

        async def work() -> None:
            for index, text in remaining:
                results[index] = await text.result(deadline)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MAX_IN_FLIGHT, len(texts))):
                    group.create_task(work())
                    await asyncio.sleep(0)  # a burst of requests would hold up every stream of this process
        except ExceptionGroup as errors:
            raise _first(errors) from None
        return results


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first

"""Serving: from the checked body of a chat or completion request to its response, whole or streamed.

A body becomes prompts, a prompt becomes one Generation for each of its answers, and the endpoint's ResponseWriter makes
the response. This module does not know how HTTP bodies are read, how a replica is chosen or what an engine does.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeAlias, TypeVar

from starlette.responses import Response

from deployments.api.generations import generations_of
from deployments.api.json_response import JsonResponse
from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.openai.answer_formats import AnswerFormat, AnswerFormats
from deployments.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from deployments.api.openai.writers import ChatWriters, CompletionWriters
from deployments.api.prompts import PromptBuilder
from deployments.api.queue_limits import check_queue_limits
from deployments.api.sse import EventStream
from deployments.api.writers import Answer, EventWriter, ResponseHead, Usage, Writers, best_answers
from deployments.config import AppConfig
from deployments.errors import ApiError
from deployments.request_log.log import RequestLog
from deployments.request_log.record import current_record
from deployments.requests.dispatcher import Dispatcher
from deployments.requests.generation import Generation
from deployments.requests.merge import merge
from deployments.requests.prompt import Prompt
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

__all__ = ["Serving"]

Body = TypeVar("Body", bound=GenerationRequest)
NewWriters: TypeAlias = Callable[[AnswerFormat | None], Writers[ChatRequest]]
Background: TypeAlias = Callable[[ResponseHead, Sequence[Generation], Callable[[], Awaitable[Response]]], Response]

COST_PER_LOGPROB = 16  # of writing one log-probability, in units of tokenising one character


class Serving:
    """Answers chat and completion requests.

    Args:
        config: the application's configuration.
        dispatcher: sends requests to the engine replicas, and knows how much is queued.
        prompts: loads the tokenizer.
        log: how much of a prompt is logged.

    Attributes:
        model: the served name.
        task: what the engines compute; other tasks than ``generate`` have endpoints of their own.
    """

    def __init__(self, config: AppConfig, dispatcher: Dispatcher, prompts: LazyPromptBuilder, log: RequestLog) -> None:
        self.model = config.served_name
        self._limits = config.limits
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._log = log
        self.task = config.task
        self._parsers = (config.tool_parser, config.reasoning_parser)
        self._formats: AnswerFormats | None = None  # once there is a tokenizer

    async def chat(
        self, body: ChatRequest, writers: NewWriters = ChatWriters, background: Background | None = None
    ) -> Response:
        """Answer a conversation.

        Args:
            body: the conversation; other APIs translate theirs to it.
            writers: how the API writes answers in a format.
            background: starts to compute the response, and returns another one at once; None to wait for it.
        """
        self._admit(body)
        builder = await self._prompts.get()
        prompts = await builder.chat(body)
        if self._formats is None:
            self._formats = AnswerFormats(builder.tokenizer, *self._parsers)
        answer_format = self._formats.of(body, prompts[0])
        if answer_format is None:
            return await self._respond(body, prompts, builder, writers(None), background=background)
        prompts = answer_format.with_shown_markers(prompts)
        body, format_writers, cost = (
            answer_format.constrained(body),
            writers(answer_format),
            answer_format.cost_per_character,
        )
        return await self._respond(body, prompts, builder, format_writers, cost, background)

    async def count_tokens(self, body: ChatRequest) -> int:
        """Return the number of tokens of a conversation's prompt."""
        self._require_model(body.model)
        builder = await self._prompts.get()
        return len((await builder.chat(body))[0].token_ids)

    async def completions(self, body: CompletionRequest) -> Response:
        """Continue one or several prompts."""
        self._admit(body)
        builder = await self._prompts.get()
        prompts = await builder.completion(body, self._limits.max_prompts_per_request)
        return await self._respond(body, prompts, builder, CompletionWriters())

    async def builder_for(self, model: str | None) -> PromptBuilder:
        """Return what tokenises for ``model``.

        Raises:
            ApiError: 404 for a model that is not served, 503 while the engines load.
        """
        self._require_model(model)
        return await self._prompts.get()

    def _admit(self, body: GenerationRequest) -> None:
        """Reject a request for another model, or while too much is queued."""
        self._require_model(body.model)
        if self.task != "generate":
            raise ApiError(
                400,
                f"model '{self.model}' is served with task: {self.task} and generates no text; use "
                + ("POST /v1/embeddings" if self.task == "embed" else "POST /v1/rerank or /v1/score"),
                param="model",
                code="wrong_task",
            )
        check_queue_limits(self._dispatcher, self._limits, body.priority)

    def _require_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404, f"model '{name[:80]}' is not served; choose '{self.model}'", param="model", code="model_not_found"
            )

    async def _respond(
        self,
        body: Body,
        prompts: Sequence[Prompt],
        builder: PromptBuilder,
        writers: Writers[Body],
        cost_per_character: float = 0.0,
        background: Background | None = None,
    ) -> Response:
        """Send the prompts to the engines; returns the whole response, or the stream once its first event exists.

        ``cost_per_character`` is that of parsing the answers; a costly response is written in a thread.
        """
        generations = await generations_of(body, prompts, builder, self._dispatcher, self._limits)
        response_id = f"{writers.id_prefix}{body.request_id or current_record().request_id}"
        self._fill_record(body, generations, response_id, self._log.prompt(builder.tokenizer, prompts[0].token_ids))
        head = ResponseHead(response_id, int(time.time()), self.model)

        async def answer() -> Response:
            with _named_by(body):
                if body.stream:
                    return await _streamed(writers.events(head, body, builder.tokenizer, generations), generations)
                return await _whole(writers, head, generations, body, builder, cost_per_character)

        return await answer() if background is None else background(head, generations, answer)

    def _fill_record(
        self, body: GenerationRequest, generations: Sequence[Generation], response_id: str, prompt: str | None
    ) -> None:
        """Put into the request's record what its log line and its spans need."""
        record = current_record()
        record.response_id, record.prompt, record.generations = response_id, prompt, generations
        record.stream, record.seed = bool(body.stream), body.seed
        record.num_answers, record.num_generated = body.num_answers, body.num_generated


@contextmanager
def _named_by(body: GenerationRequest) -> Iterator[None]:
    """Rename the engine's parameter in an error to the field of the body that set it."""
    try:
        yield
    except RequestError as error:
        raise body.renamed(error) from None


async def _streamed(events: EventWriter, generations: Sequence[Generation]) -> Response:
    deltas = merge([generation.deltas() for generation in generations])
    try:
        first = await anext(deltas)  # an error in the first second still has a status of its own
        return EventStream(first, deltas, events, _headers(generations))
    except BaseException:
        await deltas.aclose()
        raise


async def _whole(
    writers: Writers[Body],
    head: ResponseHead,
    generations: Sequence[Generation],
    body: Body,
    builder: PromptBuilder,
    cost_per_character: float,
) -> Response:
    answers = [Answer(generation) for generation in generations]
    async with aclosing(merge([generation.deltas() for generation in generations])) as deltas:
        async for delta in deltas:
            if delta is not None:
                answers[delta.index].add(delta)
    best = best_answers(answers, body.num_generated, body.num_answers)
    usage = Usage.of(generations, body.num_generated)

    def respond(tokenizer: Tokenizer) -> Response:
        return JsonResponse(writers.whole(head, body, tokenizer).response(best, usage), headers=_headers(generations))

    num_logprobs = sum(generation.num_logprobs for generation in generations)
    num_characters = sum(len(answer.text) for answer in best)
    cost = COST_PER_LOGPROB * num_logprobs + int(cost_per_character * num_characters)
    response: Response = await builder.run_with_tokenizer(respond, cost=cost)
    return response


def _headers(generations: Sequence[Generation]) -> dict[str, str]:
    return {"X-Pagoda-Replica": next((generation.replica for generation in generations if generation.replica), "")}

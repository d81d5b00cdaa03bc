"""Ingress: the HTTP surface with the OpenAI API.

It reads a request, has it checked, tokenised and sent (protocol, prompts, generation), and writes the answer whole or
as server-sent events. Each path is a route; nothing here knows how a replica is chosen or what an engine does.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial, wraps
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from deployments.api.api_keys import ApiKeys, RequireKey
from deployments.api.asgi import CountRequests, EventStream, RecordRequests, read_body
from deployments.api.overload import require_room
from deployments.api.parsing import parse_body
from deployments.api.prompts import PromptBuilder
from deployments.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from deployments.api.responses import Answer, ChatFormat, CompletionFormat, Format, best_answers, usage
from deployments.api.sampling import for_answers, require_few_answers
from deployments.api.sse import stream_events
from deployments.config import AppConfig
from deployments.errors import ApiError, as_api_error, unwrap
from deployments.observability.ingress_metrics import INGRESS_INFO, REPLICAS_MIN, ingress_recorder
from deployments.observability.prometheus import render
from deployments.observability.ray_exporter import RayExporter
from deployments.observability.recorder import Series
from deployments.requests.engine_client import EngineClient
from deployments.requests.generation import Generation
from deployments.requests.log import RequestLog
from deployments.requests.merge import merge
from deployments.requests.prompt import Prompt
from deployments.requests.record import RequestRecord, current_record, note_error
from deployments.requests.tracing import open_tracer
from deployments.routing.cluster_view import cluster_view
from deployments.routing.log import RoutedRequest
from deployments.version import pagoda_version
from deployments.web.live_view import LiveView
from deployments.web.page import WebPage
from engine.errors import RequestError
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer, import_tokenizers

__all__ = ["Ingress"]

CHARACTERS_PER_LOGPROB = 16  # what writing a log-probability costs, in characters of tokenising
COLLECT_TIMEOUT_S = 2.0  # for a replica's metrics; Prometheus waits 10 s for all
HEALTH_TIMEOUT_S = 1.0
ENGINE_TIMEOUT_S = 5.0  # while engines load: a probe or a client must get an answer, not wait
LOADING_TIMEOUT_S = 60.0  # so long a new ingress gets no requests while the engines load; then it says that they do


class Ingress:
    """The user class of the ingress deployment.

    Args:
        engines: the handle to the engine deployment.
        config: the application's configuration.
        needs_key: keys were set where the application was built, so that this node must have them too.
    """

    def __init__(self, engines: DeploymentHandle[Any], config: AppConfig, *, needs_key: bool = False) -> None:
        self._config = config
        self._keys = ApiKeys.from_environment()
        if needs_key:
            self._keys.require()
        self._engines = engines.options(request_serialization="pickle", response_serialization="pickle")
        self._view = cluster_view(engines.deployment_name)
        self._client = EngineClient(
            self._engines.options(stream=True).generate.remote,
            self._view,
            stall_timeout_s=config.limits.stall_timeout_s,
            request_timeout_s=config.limits.request_timeout_s,
        )
        self._log = RequestLog(config.logging)
        self._tracer = open_tracer(config.tracing, config.served_name)
        self._started = int(time.time())
        self._prompts: asyncio.Future[PromptBuilder] | None = None
        ingress_recorder().set(INGRESS_INFO, 1, model=config.served_name)
        ingress_recorder().set(REPLICAS_MIN, config.min_engine_replicas)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP surface; Serve asks for it when the constructor is done."""
        api = FastAPI(title="Pagoda", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        if self._keys:
            api.add_middleware(RequireKey, keys=self._keys, asks_browsers=self._config.web)
        api.add_middleware(CountRequests)
        api.add_middleware(RecordRequests, on_end=self._note)
        api.add_exception_handler(Exception, _on_error)
        api.add_exception_handler(HTTPException, _on_http_error)
        for path, method, endpoint in (
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/completions", "POST", self.completions),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/health", "GET", self.health),
            ("/ping", "GET", self.health),
            ("/metrics", "GET", self.metrics),
            ("/version", "GET", self.version),
        ):
            api.add_api_route(path, _guarded(endpoint), methods=[method])
        if self._config.web:
            self._add_web_page(api)
        return api

    def _add_web_page(self, api: FastAPI) -> None:
        engines = partial(_collect, self._engines, "live")
        page = WebPage(LiveView(self._config.served_name, engines, lambda: _collect(_siblings(), "recently_routed")))
        for path, endpoint in (("/", page.index), ("/web/{name}", page.file), ("/live", page.live)):
            api.add_api_route(path, _guarded(endpoint), methods=["GET"])

    @asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        """Get ready before Serve sends requests: one of several ingresses may be new among busy engines."""
        # Before there is an engine: that none comes up must be seen, too.
        RayExporter(ingress_recorder(), label="ingress", refresh=self._view.report_state).start()
        await asyncio.wait([self._loading()], timeout=LOADING_TIMEOUT_S)
        yield
        await asyncio.to_thread(self._tracer.close)

    def _note(self, record: RequestRecord) -> None:
        """Tell of a request that has ended."""
        self._log.write(record, self._tracer.export(record))

    # --- the model ------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body = parse_body(ChatRequest, await read_body(request, self._config.limits.max_body_bytes))
        self._require_model(body.model)
        require_room(self._view, self._config.limits, body.priority)
        prompts = await (await self._prompt_builder()).chat(body)
        return await self._answer(body, prompts, "chatcmpl", ChatFormat)

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        body = parse_body(CompletionRequest, await read_body(request, self._config.limits.max_body_bytes))
        self._require_model(body.model)
        require_room(self._view, self._config.limits, body.priority)
        builder = await self._prompt_builder()
        prompts = await builder.completion(body, self._config.limits.max_prompts_per_request)
        return await self._answer(body, prompts, "cmpl", CompletionFormat)

    async def models(self) -> Response:
        """List the served models."""
        return JSONResponse({"object": "list", "data": [await self._model_card()]})

    async def model(self, name: str) -> Response:
        """Describe one served model."""
        self._require_model(name)
        return JSONResponse(await self._model_card())

    # --- the server -----------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """Say whether a request would be served now."""
        if self._config.autoscaling.starts_from_zero and not self._view.replicas:
            return JSONResponse({"status": "idle"})  # the first request starts an engine
        await self._prompt_builder()
        if not self._view.replicas and not await self._is_answered():
            raise ApiError(503, "no engine replica is ready", code="no_replica", retry_after_s=5)
        return JSONResponse({"status": "ok"})

    async def _is_answered(self) -> bool:
        """Whether an engine answers, though none is in view, as when another request router is configured."""
        call = self._engines.info.remote()
        try:
            await asyncio.wait_for(call, HEALTH_TIMEOUT_S)
        except Exception:  # whatever it is, nothing can be served
            call.cancel()  # type: ignore[no-untyped-call]
            return False
        return True

    async def version(self) -> Response:
        """Say which version this is."""
        return JSONResponse({"version": pagoda_version()})

    async def metrics(self) -> Response:
        """Return the metrics of all engine replicas and ingresses, read now."""
        engines, ingresses = await asyncio.gather(
            _collect(self._engines, "metrics"), _collect(_siblings(), "ingress_metrics")
        )
        return PlainTextResponse(render(engines, ingresses), media_type=CONTENT_TYPE_LATEST)

    async def ingress_metrics(self) -> tuple[str, list[Series]]:
        """Return this ingress's name and the present value of every metric; any ingress may ask for it."""
        self._view.report_state()
        return serve.get_replica_context().replica_id.unique_id, ingress_recorder().snapshot()

    async def recently_routed(self) -> tuple[str, list[RoutedRequest]]:
        """Return this ingress's name and where it has sent its last requests; any ingress may ask for it."""
        return serve.get_replica_context().replica_id.unique_id, self._view.recently_routed()

    # --- a request's way ------------------------------------------------------------------------------------------

    async def _answer(
        self, body: GenerationRequest, prompts: Sequence[Prompt], prefix: str, kind: type[Format]
    ) -> Response:
        """Send the prompts, and answer whole or as a stream."""
        builder = await self._prompt_builder()
        require_few_answers(body, len(prompts), self._config.limits)
        # Each answer is a request of its own, so that each survives the loss of a replica by itself; the engine's
        # prefix cache computes their prompt once.
        answers = [
            (prompt, one)
            for prompt, params in zip(prompts, await builder.params(body, prompts), strict=True)
            for one in for_answers(params)
        ]
        generations = [
            self._generation(index, body, prompt, params, builder) for index, (prompt, params) in enumerate(answers)
        ]
        record = current_record()
        response_id = f"{prefix}-{body.request_id or record.request_id}"
        record.stream, record.seed, record.response_id = bool(body.stream), body.seed, response_id
        record.num_answers, record.num_draws, record.generations = body.num_answers, body.num_draws, generations
        record.prompt = self._log.prompt(builder.tokenizer, prompts[0].token_ids)
        form = partial(kind, response_id, int(time.time()), self._config.served_name, body)
        try:
            if not body.stream:
                return await _whole(form, generations, body, builder)
            events = stream_events(form(builder.tokenizer), generations, body)
            first = await anext(events)  # errors before the first byte still have a status of their own
        except Exception as error:
            cause = unwrap(error)
            if isinstance(cause, RequestError):  # names the engine's parameter
                raise body.renamed(cause) from None
            raise
        replica = next((one.replica for one in generations if one.replica), "")
        return EventStream(first, events, {"X-Pagoda-Replica": replica})

    def _generation(
        self, index: int, body: GenerationRequest, prompt: Prompt, params: SamplingParams, builder: PromptBuilder
    ) -> Generation:
        request = EngineRequest(
            uuid.uuid4().hex, prompt.token_ids, params, priority=body.priority, cache_salt=body.cache_salt or ""
        )
        text = builder.text_stream(prompt, params)
        return Generation(
            self._client,
            request,
            prompt,
            text,
            index=index,
            prompt_only=body.prompt_only,
            max_migrations=self._config.limits.max_migrations,
        )

    # --- what is learnt from the engines --------------------------------------------------------------------------

    async def _prompt_builder(self) -> PromptBuilder:
        """Return what needs an engine's description, fetched once, whoever asks first.

        Raises:
            ApiError: 503 if no engine has answered in time.
        """
        loading = self._loading()
        if loading.done() and not _has_failed(loading):
            return loading.result()
        try:
            return await asyncio.wait_for(asyncio.shield(loading), ENGINE_TIMEOUT_S)
        except TimeoutError:
            raise ApiError(503, "the engines are still loading", code="loading", retry_after_s=5) from None

    def _loading(self) -> asyncio.Future[PromptBuilder]:
        """Return the attempt that is under way or has succeeded, or begin another."""
        if self._prompts is None or (self._prompts.done() and _has_failed(self._prompts)):
            # In a context of its own: Serve cancels what it thinks belongs to a request whose client goes away.
            self._prompts = asyncio.get_running_loop().create_task(self._load(), context=contextvars.Context())
        return self._prompts

    async def _load(self) -> PromptBuilder:
        importing = asyncio.create_task(asyncio.to_thread(import_tokenizers))  # while the engines load
        info = await self._engines.info.remote()
        await importing
        return await asyncio.to_thread(PromptBuilder, self._config.model_path, info, self._config.served_name)

    def _require_model(self, name: str | None) -> None:
        served = self._config.served_name
        if name is not None and name != served:
            raise ApiError(
                404, f"model '{name[:80]}' is not served; choose '{served}'", param="model", code="model_not_found"
            )

    async def _model_card(self) -> dict[str, Any]:
        builder = await self._prompt_builder()
        return {
            "id": self._config.served_name,
            "object": "model",
            "created": self._started,
            "owned_by": "pagoda",
            "max_model_len": builder.context_length,
        }


async def _whole(
    form: Callable[[Tokenizer], Format],
    generations: Sequence[Generation],
    body: GenerationRequest,
    prompts: PromptBuilder,
) -> Response:
    answers = [Answer(generation) for generation in generations]
    async with aclosing(merge([generation.deltas() for generation in generations])) as deltas:
        async for delta in deltas:
            answers[delta.index].add(delta)
    best = best_answers(answers, body.num_draws, body.num_answers)
    tokens = usage(generations, body.num_draws)
    headers = {"X-Pagoda-Replica": generations[0].replica}

    def respond(tokenizer: Tokenizer) -> Response:
        return JSONResponse(form(tokenizer).response(best, tokens), headers=headers)

    num_logprobs = sum(generation.num_logprobs for generation in generations)
    response: Response = await prompts.run(CHARACTERS_PER_LOGPROB * num_logprobs, respond)
    return response


def _guarded(endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Answer whatever ``endpoint`` raises in the API's shape, before the framework sees it."""

    @wraps(endpoint)
    async def guarded(*args: Any, **kwargs: Any) -> Response:
        try:
            return await endpoint(*args, **kwargs)
        except Exception as error:
            return _error_response(error)

    return guarded


def _error_response(error: Exception) -> Response:
    answer = as_api_error(error)
    note_error(answer)
    return JSONResponse(answer.body, answer.status, headers=answer.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    return _error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method in the same shape as everything else."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    reasons = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    return _error_response(ApiError(error.status_code, reasons.get(error.status_code, str(error.detail))))


def _siblings() -> DeploymentHandle[Any]:
    """Return the handle to all ingresses."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def _collect(handle: DeploymentHandle[Any], method: str) -> dict[str, Any]:
    """Call ``method`` on every replica behind ``handle``; one that fails or does not answer in time is left out."""
    try:
        # Serve's own results_async gives all of the answers or none.
        results = await asyncio.wait_for(handle.broadcast(method)._fetch_replica_results_async(), COLLECT_TIMEOUT_S)
    except Exception as error:  # there may be no replica
        del error
        return {}
    calls = [asyncio.ensure_future(result.get_async()) for result in results]  # type: ignore[no-untyped-call]
    answered, late = await asyncio.wait(calls, timeout=COLLECT_TIMEOUT_S)
    for call in late:
        call.cancel()
    return dict(call.result() for call in answered if call.exception() is None)


def _has_failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None

"""local_engine: an engine and its endpoints in this process, without Ray, for batches without a server.

They are the parts of which the two deployments are made, connected on the loopback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from deployments.api.batches.lines import line_call
from deployments.api.body import BodyReader
from deployments.api.lazy_prompt_builder import LazyPromptBuilder
from deployments.api.openai.endpoints import OpenAiApi
from deployments.api.pooling.endpoints import PoolingApi
from deployments.api.pooling.serving import PoolingServing
from deployments.api.responses.endpoints import Responses
from deployments.api.serving import Serving
from deployments.batch.in_process import LineCall
from deployments.config import AppConfig
from deployments.request_log.log import RequestLog
from deployments.requests.dispatcher import Dispatcher
from deployments.routing.cluster_view import ClusterView
from deployments.transport.replica_metadata import BLOCK_SIZE
from deployments.transport.request_channel.server import ChannelServer
from engine.async_engine import AsyncEngine
from engine.config import EngineInfo
from engine.engine import Engine
from engine.observability.load import EngineLoad
from engine.pooling.engine import PoolingEngine

__all__ = ["local_engine"]

_NAME, _HOST = "local", "127.0.0.1"
_NEVER_S = 1e9  # there is no other replica on which a request could continue


@asynccontextmanager
async def local_engine(config: AppConfig) -> AsyncIterator[tuple[LineCall, int]]:
    """Run an engine in the block; yields what sends a line, and how many run at once.

    Raises:
        PagodaError: the engine cannot start.
    """
    view = ClusterView()
    engine = await asyncio.to_thread(_start, config, view)
    num_lines, limits = config.engine_config.max_num_seqs, config.limits
    channel = ChannelServer(engine, _HOST, max_requests=2 * num_lines, on_hashes=lambda hashes: None)
    blocks = {BLOCK_SIZE: engine.info.block_size} if engine.info.num_blocks else {}
    view.set_replicas({_NAME: {**blocks, **channel.address.metadata}})

    async def info() -> EngineInfo:
        return engine.info

    dispatcher = Dispatcher(
        view,
        info,
        max_requests=2 * num_lines,
        stall_timeout_s=_NEVER_S,
        request_timeout_s=_NEVER_S,
        max_background=num_lines,
    )
    dispatcher.start()
    log = RequestLog(config.logging)
    prompts = LazyPromptBuilder(info, config.model_path, config.served_name, config.load_tokenizer)
    bodies = BodyReader(limits.max_body_bytes, limits.body_timeout_s)
    serving = Serving(config, dispatcher, prompts, log)
    routes = [
        *OpenAiApi(serving, bodies).routes(),
        *Responses(serving, bodies, limits, _ask_no_one).routes(),
        *PoolingApi(PoolingServing(config, dispatcher, prompts, log), bodies).routes(),
    ]
    try:
        await prompts.wait(_NEVER_S)
        yield line_call(routes, lambda record: None), num_lines
    finally:
        dispatcher.close()
        await engine.shutdown()
        channel.close()


def _start(config: AppConfig, view: ClusterView) -> AsyncEngine:
    def report(load: EngineLoad) -> None:
        view.routing.report(_NAME, load, now=time.monotonic())

    if config.pooling_config is not None:
        return AsyncEngine(PoolingEngine.from_config(config.engine_config, config.pooling_config), on_load=report)
    started = AsyncEngine(Engine.from_config(config.engine_config), on_load=report)
    started.load_grammar_compiler()
    return started


async def _ask_no_one(method: str, argument: Any) -> None:
    return None

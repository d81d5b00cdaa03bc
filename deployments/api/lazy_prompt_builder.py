"""LazyPromptBuilder: the ingress's PromptBuilder, built once an engine has described itself."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from deployments.api.prompts import PromptBuilder
from deployments.errors import ApiError
from engine.config import EngineInfo
from engine.text.tokenizer import Tokenizer, import_tokenizers

__all__ = ["LazyPromptBuilder"]

TIMEOUT_S = 5.0  # while engines load: a probe or a client must get an answer, not wait
NOT_READY = "no engine serves yet: engines are loading, or wait for resources"


class LazyPromptBuilder:
    """Builds the PromptBuilder in one task, for which all requests wait; a build that failed is started again.

    Args:
        fetch_info: calls an engine for its description; waits while there is no engine.
        path: the checkpoint's directory.
        model_name: the served name.
        load_tokenizer: as for PromptBuilder.
    """

    def __init__(
        self,
        fetch_info: Callable[[], Awaitable[EngineInfo]],
        path: Path,
        model_name: str,
        load_tokenizer: Callable[[Path], Tokenizer] = Tokenizer,
    ) -> None:
        self._fetch_info = fetch_info
        self._path = path
        self._model_name = model_name
        self._load_tokenizer = load_tokenizer
        self._task: asyncio.Future[PromptBuilder] | None = None

    async def wait(self, timeout_s: float) -> None:
        """Wait for the end of the build, successful or not, but not longer than ``timeout_s``."""
        await asyncio.wait([self._build_task()], timeout=timeout_s)

    async def get(self) -> PromptBuilder:
        """Return the PromptBuilder.

        Raises:
            ApiError: 503 if no engine has answered in time.
        """
        build = self._build_task()
        if build.done() and not _has_failed(build):
            return build.result()
        try:
            return await asyncio.wait_for(asyncio.shield(build), TIMEOUT_S)
        except TimeoutError:
            raise ApiError(503, NOT_READY, code="loading", retry_after_s=5) from None

    def _build_task(self) -> asyncio.Future[PromptBuilder]:
        """Return the task that builds; start one if there is none or it failed."""
        if self._task is None or (self._task.done() and _has_failed(self._task)):
            # In a context of its own: Serve cancels the tasks of a request whose client disconnects.
            self._task = asyncio.get_running_loop().create_task(self._build(), context=contextvars.Context())
        return self._task

    async def _build(self) -> PromptBuilder:
        importing = asyncio.create_task(asyncio.to_thread(import_tokenizers))  # while the engines load
        info = await self._fetch_info()
        await importing
        return await asyncio.to_thread(PromptBuilder, self._path, info, self._model_name, self._load_tokenizer)


def _has_failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None

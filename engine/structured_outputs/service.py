"""GrammarService: the grammars of requests with structured outputs, compiled in any thread or awaited in asyncio.

Knows one engine's model. Does not know requests, sampling or the step loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.errors import RequestError
from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.compiler import GrammarCompiler
from engine.structured_outputs.grammar import Grammar

__all__ = ["GrammarService"]

_MAX_THREADS = 32  # most of them wait: for the process that tries grammars out, or for another compilation
_MAX_TOKENS_ON_EVENT_LOOP = 256  # output tokens that a grammar accepts within a few milliseconds


class GrammarService:
    """Returns each request's grammar in the state after the request's output tokens. Any thread may use it.

    Args:
        compiler: of the engine's model.
        on_rejected: receives every RequestError before it is raised. It may be called from any thread.
    """

    def __init__(self, compiler: GrammarCompiler, on_rejected: Callable[[RequestError], None]) -> None:
        self._compiler = compiler
        self._on_rejected = on_rejected
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="grammar-compiler")

    def load(self) -> None:
        """Begin in a thread of its own to load what compiling needs. Without it the first request waits for that."""

        def load() -> None:
            with contextlib.suppress(RequestError):  # each request with structured outputs gets it
                self._compiler.load()

        self._threads.submit(load)

    def compile(self, params: StructuredOutputsParams | None, output_token_ids: Sequence[int] = ()) -> Grammar | None:
        """Return the grammar; None without structured outputs. This may take seconds.

        Raises:
            RequestError: if the grammar cannot be compiled, or not in time, or does not allow the tokens.
        """
        if params is None:
            return None
        try:
            return _advanced(self._compiler.compile(params), output_token_ids)
        except RequestError as error:
            self._on_rejected(error)
            raise

    def cached(self, params: StructuredOutputsParams | None, output_token_ids: Sequence[int] = ()) -> Grammar | None:
        """Return the grammar if that needs no waiting, None otherwise. Event loops may call it.

        Raises:
            RequestError: as ``compile``, if the same grammar was rejected before.
        """
        if params is None or len(output_token_ids) > _MAX_TOKENS_ON_EVENT_LOOP:
            return None
        try:
            grammar = self._compiler.cached(params)
            return None if grammar is None else _advanced(grammar, output_token_ids)
        except RequestError as error:
            self._on_rejected(error)
            raise

    async def compile_async(
        self, params: StructuredOutputsParams | None, output_token_ids: Sequence[int] = ()
    ) -> Grammar | None:
        """Return the grammar as ``compile`` does, without blocking the event loop.

        Raises:
            RequestError: as ``compile``.
        """
        if params is None:
            return None
        grammar = self.cached(params, output_token_ids)
        if grammar is not None:
            return grammar
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.compile, params, output_token_ids)

    def close(self) -> None:
        """End the compiler's process."""
        self._compiler.close()


def _advanced(grammar: Grammar, token_ids: Sequence[int]) -> Grammar:
    """Return ``grammar`` in its state after tokens that were generated before."""
    if not all(map(grammar.accept, token_ids)):
        raise RequestError(
            f"do not fit the tokens that were generated earlier: {grammar.error}", param="structured_outputs"
        )
    return grammar

"""AsyncEngine: drives an Engine from a thread of its own and delivers each request's tokens to its reader.

The engine belongs to that thread; other threads only put commands into its inbox. After each step the thread calls
each reader once, however many of its requests got a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from engine.engine import Engine
from engine.errors import EngineDeadError, OverloadedError, RequestError
from engine.kv.block_map import BlockMap, cell_size, cells_by_slice
from engine.observability.load import EngineLoad, EngineStats
from engine.observability.load_reporter import LoadReporter
from engine.output_reader import OutputReader
from engine.output_streams import OutputStreams, post
from engine.outputs import EngineOutput
from engine.request import EngineRequest
from engine.structured_outputs.grammar import Grammar

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.01  # least time between two load reports of a busy engine
MAP_PAUSE_S = 0.001  # between two slices of the block map, so that the step thread gets the interpreter's lock


class AsyncEngine:
    """Runs an engine in a thread and serves requests of event loops and of other readers.

    Args:
        engine: only this object may use it from now on.
        on_load: receives the load in the step thread: when requests have arrived or left or the queue has changed, at
            most every 10 ms, now and then while the engine only decodes, and when it becomes idle. It must be quick;
            its exceptions are logged.
        replica: name that the outputs carry.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        on_load: Callable[[EngineLoad], None] | None = None,
        *,
        replica: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.info = engine.info
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._streams = OutputStreams(
            replica, on_closed_loop=lambda loop: self._inbox.put(lambda: self._abort_loop(loop))
        )
        self._readers: dict[str, tuple[OutputReader, Any]] = {}  # key -> (reader, tag); of the step thread alone
        self._why_dead: str | None = None  # set when the step loop has ended
        self._clock = clock
        self._busy_since: float | None = None  # start of the step or command that runs now
        self._reporter = None if on_load is None else LoadReporter(on_load, LOAD_INTERVAL_S, clock)
        self._stats = engine.stats()
        self._load = engine.load()
        self._thread = threading.Thread(target=self._run, name="engine-step-loop", daemon=True)
        self._thread.start()

    # --- called from event loops --------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request and yield its answers' tokens as they come. Closing the iterator aborts the request.

        Each answer's last output has a ``finish_reason``. Where the best answers are known only at the end
        (``best_of``, beams), there is one output for each. After ``output_token_ids``, which were generated elsewhere,
        the answer goes on, and only new tokens are yielded.

        Raises:
            RequestError: before the first output, if the request is invalid.
            OverloadedError: before the first output, if the queue is full, or if the request is rejected from the
                queue to make room for one of higher priority. Neither happens with ``output_token_ids``.
            RuntimeError: if the engine has a bug that this request triggers; other requests go on.
            EngineDeadError: if the step loop has ended or ends meanwhile.
        """
        self.check_request(request)
        grammar = await self.compile_grammar(request)
        self.check_health()
        stream = self._streams.open(request.request_id)
        if stream is None:
            raise RequestError("is in use", param="request_id", value=request.request_id, remedy="choose another")
        try:
            self.submit(replace(request, request_id=stream.key), self._streams, stream, grammar)
            while not stream.is_done:
                for output in await stream.take():
                    yield output
        finally:
            self._streams.close(stream)
            if not stream.is_done:
                self.abort_key(stream.key)

    def abort(self, request_id: str) -> None:
        """End a request if it is unfinished and free its blocks; its reader gets the reason ``abort``."""
        stream = self._streams.find(request_id)
        if stream is not None:
            self.abort_key(stream.key)

    def end_answer(self, request_id: str, index: int = 0) -> None:
        """End one answer of a request with reason ``stop``, when a stop string was found in its text for example.

        Its reader gets no further output of that answer, and the iterator ends with the last answer. Answers that are
        output only at the end go on, and so do several answers before the first token of any.
        """
        stream = self._streams.find(request_id)
        if stream is not None:
            self._inbox.put(lambda: self._end_answer(stream.key, index))

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix; returns when it is done."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def reset() -> None:
            self._engine.reset_prefix_cache()
            post(loop, done.set)

        self._inbox.put(reset)
        while not done.is_set():
            self.check_health()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), timeout=1.0)

    # --- called for readers of any kind, from any thread ----------------------------------------------------------

    def check_request(self, request: EngineRequest) -> None:
        """Reject a request that can never run.

        Raises:
            RequestError, PromptTooLongError: as ``RequestValidator.check``.
        """
        self._engine.check_request(request)

    def load_grammar_compiler(self) -> None:
        """Begin to load what structured outputs need; returns at once."""
        self._engine.grammars.load()

    async def compile_grammar(self, request: EngineRequest) -> Grammar | None:
        """Return the grammar of a request's structured outputs, if it has any.

        Raises:
            RequestError, OverloadedError: as ``GrammarService.compile_async``.
            EngineDeadError: as ``check_health``.
        """
        if (form := request.params.structured_outputs) is None:
            return None
        self.check_health()
        return await self._engine.grammars.compile_async(form, request.output_token_ids)

    def submit(self, request: EngineRequest, reader: OutputReader, tag: Any, grammar: Grammar | None = None) -> None:
        """Queue a request that ``check_request`` has accepted; its outputs, or its error, go to ``reader``.

        Args:
            request: its id must be unique among all readers' unfinished requests.
            reader: called in the step thread.
            tag: names the request to the reader.
            grammar: what ``compile_grammar`` has returned.

        Raises:
            EngineDeadError: if the step loop has ended. The reader may get this error, too.
        """
        arrived = monotonic()  # a step may run for long before the request is queued
        self._inbox.put(lambda: self._queue(request, reader, tag, grammar, arrived))
        if self._why_dead is not None:  # the step thread may have emptied its inbox before
            raise EngineDeadError(self._why_dead)

    def abort_key(self, key: str) -> None:
        """End the request that was submitted under the id ``key``, if it is unfinished."""
        self._inbox.put(lambda: self._abort(key))

    def remove_reader(self, reader: OutputReader) -> None:
        """Abort all requests of a reader."""
        self._inbox.put(lambda: self._abort_all(reader))

    def call_in_step_thread(self, callback: Callable[[], None]) -> None:
        """Call a function in the step thread, before the next step. It must be quick, and raise nothing."""
        self._inbox.put(callback)

    # --- state ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return sequences and blocks by state, as they were after the last step."""
        return self._stats

    def load(self) -> EngineLoad:
        """Return how busy the engine was after its last step, and how fast it computes. Any thread may call it."""
        return self._load

    async def block_map(self, max_cells: int = 1024) -> BlockMap:
        """Return a picture of the block pool. It waits for no step and delays none."""
        blocks, cells = self._engine.block_manager.pool.blocks, bytearray()
        size = cell_size(len(blocks), max_cells)
        for part in cells_by_slice(blocks, size):
            cells += part
            await asyncio.sleep(MAP_PAUSE_S)
        return BlockMap(len(blocks), size, bytes(cells))

    def check_health(self) -> None:
        """Raise EngineDeadError if the step loop has ended, is stuck, or cannot compute the next step.

        A step that takes longer than ``step_timeout_s`` counts as stuck; if it ends after all, the engine is healthy
        again. Any thread may call this; it does not block.
        """
        if self._why_dead is not None:
            raise EngineDeadError(self._why_dead)
        busy_since, limit = self._busy_since, self._engine.config.step_timeout_s
        if busy_since is not None and (seconds := self._clock() - busy_since) > limit:
            raise EngineDeadError(
                f"the engine's step has been running for {seconds:.0f} s, and step_timeout_s={limit:g}; restart it"
            )
        self._engine.runner.check_health()

    async def shutdown(self) -> None:
        """End the step loop after the current step; unfinished requests fail."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- the step thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while self._run_commands():
                self._busy_since = self._clock()
                self._publish(self._engine.step())
        except BaseException as error:  # whatever ends the loop, no reader may wait for it any longer
            logger.exception("the engine's step loop failed")
            reason = f"the engine's step loop failed: {type(error).__name__}: {error}"
        self._why_dead = reason
        self._fail_all(reason)
        self._engine.close()

    def _run_commands(self) -> bool:
        """Run every command in the inbox, and wait for one while there is nothing to compute; False at the end."""
        wait_s: float | None = 0  # 0: only look; None: wait for a command; otherwise the time to the next load report
        while True:
            try:
                command = self._inbox.get(block=False) if wait_s == 0 else self._inbox.get(timeout=wait_s)
            except Empty:
                next_report_s = self._report_load()
                if self._engine.has_unfinished:
                    return True
                self._busy_since, wait_s = None, next_report_s
                continue
            if command is None:
                return False
            self._busy_since, wait_s = self._clock(), 0
            command()

    def _report_load(self) -> float | None:
        """Store the latest numbers and report them if it is time; return the seconds until the next report."""
        self._stats = self._engine.stats()
        self._load = load = self._engine.load()
        if self._reporter is not None:
            is_idle = not self._engine.has_unfinished
            try:
                return self._reporter.update(load, self._engine.num_changes, is_idle=is_idle)
            except Exception:  # a listener's mistake ends no request
                logger.exception("the engine's load could not be reported")
        return None

    def _publish(self, outputs: list[EngineOutput]) -> None:
        """Deliver the outputs of a step, with one call to each reader."""
        by_reader: dict[OutputReader, list[tuple[Any, EngineOutput]]] = {}
        for output in outputs:
            found = self._readers.get(output.request_id)
            if found is None:
                continue
            reader, tag = found
            by_reader.setdefault(reader, []).append((tag, output))
            if output.is_last:
                del self._readers[output.request_id]
        for reader, tagged in by_reader.items():
            try:
                reader.publish(tagged)
            except Exception:  # a reader's mistake must not end the requests of the others
                logger.exception("a reader could not take its outputs; its requests are aborted")
                self._abort_all(reader)

    def _queue(
        self, request: EngineRequest, reader: OutputReader, tag: Any, grammar: Grammar | None, arrived: float
    ) -> None:
        """Queue a request; what goes wrong fails its reader alone."""
        key = request.request_id
        if self._why_dead is not None:
            reader.fail(tag, EngineDeadError(self._why_dead))
            return
        self._readers[key] = (reader, tag)
        try:
            self._engine.queue_request(request, grammar=grammar, on_rejected=self._fail, arrived=arrived)
        except OverloadedError as error:
            self._fail(key, error)
        except Exception as error:  # a bug of ours must not end the other requests
            logger.exception("request %s could not be queued", key)
            self._fail(key, RuntimeError(f"the request could not be queued: {type(error).__name__}: {error}"))

    def _fail(self, key: str, error: Exception) -> None:
        """Report the error of a request that is not, or no longer, in the engine."""
        reader, tag = self._readers.pop(key)
        reader.fail(tag, error)

    def _fail_all(self, reason: str) -> None:
        """Fail every request with an error of its own, those in the inbox included."""
        for key in list(self._readers):
            self._fail(key, EngineDeadError(reason))
        while not self._inbox.empty():
            if (command := self._inbox.get()) is not None:
                with contextlib.suppress(Exception):  # of the engine that has failed
                    command()

    def _abort(self, key: str) -> None:
        if key in self._readers:
            self._engine.abort(key)
            self._end(key, is_aborted=True)

    def _end_answer(self, key: str, index: int) -> None:
        if key in self._readers and self._engine.end_sequence(key, index) and not self._engine.is_unfinished(key):
            self._end(key, is_aborted=False)

    def _end(self, key: str, *, is_aborted: bool) -> None:
        reader, tag = self._readers.pop(key)
        reader.end(tag, is_aborted=is_aborted)

    def _abort_all(self, reader: OutputReader) -> None:
        """Abort the requests of a reader."""
        for key in [key for key, (one, _) in self._readers.items() if one is reader]:
            self._abort(key)

    def _abort_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abort the requests of an event loop that was closed."""
        self._streams.remove_loop(loop)
        tagged = [(key, tag) for key, (reader, tag) in self._readers.items() if reader is self._streams]
        for key, stream in tagged:
            if stream.loop is loop:
                self._abort(key)

"""AsyncEngine: drives an engine from a thread of its own and delivers each request's tokens to its reader.

The engine belongs to that thread; other threads only put commands into its inbox. After each step the thread calls
each reader once, however many of its requests got a token. Knows neither event loops nor sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from engine.errors import EngineDeadError, OverloadedError
from engine.kv.block_map import BlockMap, cell_size, cells_by_slice
from engine.observability.load import EngineLoad, EngineStats
from engine.observability.load_reporter import LoadReporter
from engine.outputs import EngineOutput, OutputReader, StepOutputs
from engine.request import EngineRequest
from engine.step_engine import StepEngine
from engine.structured_outputs.grammar import Grammar

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.01  # least time between two load reports of a busy engine
MAP_PAUSE_S = 0.001  # between two slices of the block map, so that the step thread gets the interpreter's lock


class AsyncEngine:
    """Runs an engine in a thread and serves the requests of several readers.

    Args:
        engine: only this object may use it from now on.
        on_load: receives the load in the step thread: when requests have arrived or left or the queue has changed, at
            most every 10 ms, now and then while the engine only decodes, and when it becomes idle. It must be quick;
            its exceptions are logged.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: StepEngine,
        on_load: Callable[[EngineLoad], None] | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.info = engine.info
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._readers = _Readers()  # of the step thread alone
        self._why_dead: str | None = None  # set when the step loop has ended
        self._clock = clock
        self._busy_since: float | None = None  # start of the step or command that runs now
        self._reporter = None if on_load is None else LoadReporter(on_load, LOAD_INTERVAL_S, clock)
        self._stats = engine.meter.stats()
        self._load = engine.meter.load()
        engine.forward_calls(self.call_in_step_thread)
        self._thread = threading.Thread(target=self._run, name="engine-step-loop", daemon=True)
        self._thread.start()

    # --- called from any thread -----------------------------------------------------------------------------------

    def check_request(self, request: EngineRequest) -> None:
        """Reject a request that can never run.

        Raises:
            RequestError, PromptTooLongError: as ``RequestValidator.check``.
        """
        self._engine.check_request(request)

    def load_grammar_compiler(self) -> None:
        """Begin to load what structured outputs need; returns at once."""
        if self._engine.grammars is not None:
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
        assert self._engine.grammars is not None, "a pooling engine's requests have no structured outputs"
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

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks, if it is unfinished."""
        self._inbox.put(lambda: self._abort(request_id))

    def remove_reader(self, reader: OutputReader) -> None:
        """Abort all requests of a reader."""
        self._inbox.put(lambda: self._abort_all(reader))

    def end_all(self, new_error: Callable[[], Exception]) -> None:
        """End all unfinished requests with an error of their own each; their blocks stay in the prefix cache."""
        self._inbox.put(lambda: self._end_all(new_error))

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
        blocks, cells = self._engine.blocks, bytearray()
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
                for reader in self._readers.publish(self._engine.step()):  # its mistake ends no other's requests
                    self._abort_all(reader)
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
                if self._engine.can_step:
                    return True
                self._busy_since, wait_s = None, next_report_s
                continue
            if command is None:
                return False
            self._busy_since, wait_s = self._clock(), 0
            command()

    def _report_load(self) -> float | None:
        """Store the latest numbers and report them if it is time; return the seconds until the next report."""
        self._stats = self._engine.meter.stats()
        self._load = load = self._engine.meter.load()
        if self._reporter is not None:
            is_idle = not self._engine.has_unfinished
            try:
                return self._reporter.update(load, self._engine.meter.num_changes, is_idle=is_idle)
            except Exception:  # a listener's mistake ends no request
                logger.exception("the engine's load could not be reported")
        return None

    def _queue(
        self, request: EngineRequest, reader: OutputReader, tag: Any, grammar: Grammar | None, arrived: float
    ) -> None:
        """Queue a request; what goes wrong fails its reader alone."""
        key = request.request_id
        if self._why_dead is not None:
            reader.fail(tag, EngineDeadError(self._why_dead))
            return
        self._readers.add(key, reader, tag)
        try:
            self._engine.queue_request(request, grammar=grammar, on_rejected=self._readers.fail, arrived=arrived)
        except OverloadedError as error:
            self._readers.fail(key, error)
        except Exception as error:  # a bug of ours must not end the other requests
            logger.exception("request %s could not be queued", key)
            self._readers.fail(key, RuntimeError(f"the request could not be queued: {type(error).__name__}: {error}"))

    def _fail_all(self, reason: str) -> None:
        """Fail every request with an error of its own, those in the inbox included."""
        for key in self._readers.request_ids():
            self._readers.fail(key, EngineDeadError(reason))
        while not self._inbox.empty():
            if (command := self._inbox.get()) is not None:
                with contextlib.suppress(Exception):  # of the engine that has failed
                    command()

    def _abort(self, request_id: str) -> None:
        if request_id in self._readers:
            self._engine.abort(request_id)
            self._readers.end(request_id)

    def _end_all(self, new_error: Callable[[], Exception]) -> None:
        for request_id in self._readers.request_ids():
            self._engine.abort(request_id)
            self._readers.fail(request_id, new_error())

    def _abort_all(self, reader: OutputReader) -> None:
        """Abort the requests of a reader."""
        for request_id in self._readers.request_ids(reader):
            self._abort(request_id)


class _Readers:
    """The reader of each unfinished request, and the reader's tag for it."""

    def __init__(self) -> None:
        self._by_request: dict[str, tuple[OutputReader, Any]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def __len__(self) -> int:
        return len(self._by_request)

    def request_ids(self, reader: OutputReader | None = None) -> list[str]:
        """Return the unfinished requests of one reader, or all."""
        return [name for name, (other, _) in self._by_request.items() if reader is None or other is reader]

    def add(self, request_id: str, reader: OutputReader, tag: Any) -> None:
        """Add a request."""
        self._by_request[request_id] = (reader, tag)

    def publish(self, outputs: StepOutputs) -> list[OutputReader]:
        """Deliver the outputs of a step, with one call to each reader; return the readers that could not take them."""
        batches: dict[OutputReader, _Batch] = {}
        by_request = self._by_request
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            if (entry := by_request.get(request_id)) is not None:  # else it was aborted
                reader, tag = entry
                if (batch := batches.get(reader)) is None:
                    batch = batches[reader] = _Batch()
                batch.tags.append(tag)
                batch.token_ids.append(token_id)
        for output in outputs.others:
            if (entry := by_request.get(output.request_id)) is not None:
                reader, tag = entry
                batches.setdefault(reader, _Batch()).others.append((tag, output))
                if output.is_last:
                    del by_request[output.request_id]
        return [reader for reader, batch in batches.items() if not batch.publish(reader)]

    def fail(self, request_id: str, error: Exception) -> None:
        """Report the error of a request that is not, or no longer, in the engine."""
        reader, tag = self._by_request.pop(request_id)
        reader.fail(tag, error)

    def end(self, request_id: str) -> None:
        """Report the end of a request that was aborted."""
        reader, tag = self._by_request.pop(request_id)
        reader.end(tag)


@dataclass(slots=True)
class _Batch:
    """The outputs of one step for one reader."""

    tags: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    others: list[tuple[Any, EngineOutput]] = field(default_factory=list)

    def publish(self, reader: OutputReader) -> bool:
        """Call the reader; False if it raises."""
        try:
            reader.publish(self.tags, self.token_ids, self.others)
        except Exception:
            logger.exception("a reader could not take its outputs; its requests are aborted")
            return False
        return True

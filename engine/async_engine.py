"""AsyncEngine: drives an Engine from a thread of its own and streams each request's tokens to asyncio.

The engine belongs to that thread; other threads only put commands into its inbox. After each step the thread posts one
message to the event loop, however many requests got a token, and each request's stream keeps what has queued until
its reader takes it: the first token at once, later ones in batches when the reader is slower than the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from time import monotonic

from engine.config import EngineConfig
from engine.engine import Engine, EngineInfo, EngineStats
from engine.errors import EngineDeadError, OverloadedError, RequestError
from engine.kv.block_map import BlockMap, cell_size, cells_by_slice
from engine.kv.events import KVEventBatch
from engine.observability.load import EngineLoad, LoadReporter
from engine.observability.metrics import MetricSink
from engine.outputs import EngineOutput, FinishReason
from engine.request import EngineRequest

__all__ = ["AsyncEngine"]

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.01  # between two reports of a busy engine's load, at least
MAP_PAUSE_S = 0.001  # between two slices of the block map, in which the step thread gets the interpreter's lock


@dataclass(slots=True)
class _Stream:
    """The queue between the engine and one reader. It lives on the reader's event loop.

    Its key, not the request's id, names the sequence inside the engine: an id may be used again as soon as its reader
    has gone, while a step still computes the old sequence.
    """

    key: str
    replica: str
    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    outputs: list[EngineOutput] = field(default_factory=list)
    aborted: bool = False  # from outside: no output says so
    closed: bool = False  # its last answer was ended from outside
    is_done: bool = False  # nothing more will come
    error: Exception | None = None

    def put(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.ready.set()

    def abort(self) -> None:
        self.aborted = True
        self.ready.set()

    def close(self) -> None:
        self.closed = True
        self.ready.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ready.set()

    async def take(self) -> list[EngineOutput]:
        """Wait until something has queued and return all of it; how it ended comes after its last tokens."""
        await self.ready.wait()
        self.ready.clear()
        outputs, self.outputs = self.outputs, []
        if not outputs:
            if self.error is not None:
                raise self.error
            self.is_done = True
            assert self.aborted or self.closed
            return [EngineOutput(self.key, 0, [], FinishReason.ABORT, replica=self.replica)] if self.aborted else []
        if self.error is not None or self.aborted or self.closed:
            self.ready.set()
        self.is_done = any(output.is_last for output in outputs)
        by_answer: dict[int, list[EngineOutput]] = {}
        for output in outputs:
            by_answer.setdefault(output.index, []).append(output)
        return [EngineOutput.join(one, self.replica) for one in by_answer.values()]


class AsyncEngine:
    """An engine that runs by itself.

    Args:
        engine: handed over: nobody else may touch it from now on.
        on_load: called from the step thread when requests have arrived or left or the queue has changed, at most every
            10 ms, now and then while it only decodes, and when it has become idle. It must be quick; what it raises is
            logged.
        replica: what the outputs say of where they come from.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        engine: Engine,
        on_load: Callable[[EngineLoad], None] | None = None,
        *,
        replica: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.info: EngineInfo = engine.info
        self._engine = engine
        self._replica = replica
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next three between the step thread and the readers
        self._streams: dict[str, _Stream] = {}  # by request id
        self._by_key: dict[str, _Stream] = {}
        self._why_dead: str | None = None
        self._num_streams = 0
        self._clock = clock
        self._busy_since: float | None = None  # when the step or command began that runs now
        self._reporter = None if on_load is None else LoadReporter(on_load, LOAD_INTERVAL_S, clock)
        self._stats = engine.stats()
        self._load = engine.load()
        self._thread = threading.Thread(target=self._run, name="engine-step-loop", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        sink: MetricSink | None = None,
        on_kv_events: Callable[[KVEventBatch], None] | None = None,
        on_load: Callable[[EngineLoad], None] | None = None,
        replica: str = "",
    ) -> AsyncEngine:
        """Load the model (this blocks) and start the step loop.

        Raises:
            ConfigError, ModelLoadError: as ``Engine.from_config``.
        """
        return cls(Engine.from_config(config, sink, on_kv_events), on_load, replica=replica)

    # --- for the event loop -------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request and yield its answers' tokens as they come. Closing the iterator aborts the request.

        Each answer's last batch has a ``finish_reason``; where the best answers are known only at the end (``best_of``,
        beams), there is one batch for each. ``output_token_ids`` were generated elsewhere before: the answer goes on
        behind them, and only what is new is yielded.

        Raises:
            RequestError: before the first batch, if the request is invalid.
            OverloadedError: before the first batch, if the queue is full, or if this request, while it waits, gives
                way to one of higher priority. With ``output_token_ids`` neither happens.
            RuntimeError: if it trips over a bug of ours; other requests go on.
            EngineDeadError: if the step loop has ended or ends meanwhile.
        """
        self._engine.check_request(request)
        params, request_id = request.params, request.request_id
        grammar = None
        if params.structured_outputs is not None:
            self.check_health()
            grammar = await self._engine.compile_grammar_soon(params, request.output_token_ids)
        stream = self._open(request_id)

        def add() -> None:
            try:
                keyed = replace(request, request_id=stream.key)
                self._engine.queue_request(keyed, grammar=grammar, on_shed=self._shed)
            except OverloadedError as error:
                _call_soon(stream.loop, stream.fail, error)
            except Exception as error:  # a request that trips over a bug of ours is still only one request
                logger.exception("request %s could not be queued", request_id)
                failure = RuntimeError(f"the request could not be queued: {type(error).__name__}: {error}")
                _call_soon(stream.loop, stream.fail, failure)

        self._inbox.put(add)
        try:
            while not stream.is_done:
                for batch in await stream.take():
                    yield batch
        finally:
            self._close(request_id, stream)
            if not stream.is_done:
                self._inbox.put(lambda: self._abort(stream.key))

    def abort(self, request_id: str) -> None:
        """End a request if it is still unfinished, free its blocks, and tell its reader: reason ``abort``."""
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            self._inbox.put(lambda: self._abort(stream.key))

    def end_answer(self, request_id: str, index: int = 0) -> None:
        """End one answer of a request with reason ``stop``, when a stop string was found in its text for example.

        Its reader gets no further batch of that answer, and the iterator ends with the last of them. Answers that are
        held back until the end go on, and so do several answers before the first token of any.
        """
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            self._inbox.put(lambda: self._end_answer(stream, index))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; returns when it is done."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def reset() -> None:
            self._engine.reset_prefix_cache()
            _call_soon(loop, done.set)

        self._inbox.put(reset)
        while not done.is_set():
            self.check_health()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), timeout=1.0)

    def stats(self) -> EngineStats:
        """Return how busy the engine was after its last step."""
        return self._stats

    def load(self) -> EngineLoad:
        """Return how busy the engine was after its last step, and how fast it computes. Any thread may ask."""
        return self._load

    async def block_map(self, max_cells: int = 1024) -> BlockMap:
        """Return a picture of the block pool. It waits for no step, and none waits for it."""
        blocks, cells = self._engine.block_manager.pool.blocks, bytearray()
        size = cell_size(len(blocks), max_cells)
        for part in cells_by_slice(blocks, size):
            cells += part
            await asyncio.sleep(MAP_PAUSE_S)
        return BlockMap(len(blocks), size, bytes(cells))

    def check_health(self) -> None:
        """Raise EngineDeadError if the step loop has ended, is stuck, or cannot compute the next step.

        A step that takes longer than ``step_timeout_s`` is taken for stuck; should it end after all, the engine is
        healthy again. Any thread may ask, and none waits for an answer.
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
        """End the step loop after the step that runs; requests that are unfinished fail."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _open(self, request_id: str) -> _Stream:
        with self._lock:
            self.check_health()
            held = self._streams.get(request_id)
            if held is not None and not held.loop.is_closed():
                raise RequestError("is in use", param="request_id", value=request_id, remedy="choose another")
            self._num_streams += 1
            stream = _Stream(f"{request_id}#{self._num_streams}", self._replica, asyncio.get_running_loop())
            self._streams[request_id] = self._by_key[stream.key] = stream
        if held is not None:  # the step thread has not noticed yet
            self._inbox.put(lambda: self._forget(held.loop))
        return stream

    def _close(self, request_id: str, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(request_id) is stream:  # else its loop was closed, and the id may be another's by now
                del self._streams[request_id]
            self._by_key.pop(stream.key, None)

    # --- the step thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            while self._obey():
                self._busy_since = self._clock()
                self._deliver(self._engine.step())
        except BaseException as error:  # whatever ended the loop, nobody may wait for it any longer
            logger.exception("the engine's step loop failed")
            reason = f"the engine's step loop failed: {type(error).__name__}: {error}"
        self._die(reason)
        self._engine.close()

    def _obey(self) -> bool:
        """Carry out every command in the inbox, waiting for one while there is nothing to compute; False at the end."""
        wait_s: float | None = 0  # first look, then wait: until a command comes, or a report of the load is due
        while True:
            try:
                command = self._inbox.get(block=False) if wait_s == 0 else self._inbox.get(timeout=wait_s)
            except Empty:
                later_s = self._note_load()
                if self._engine.has_unfinished:
                    return True
                self._busy_since, wait_s = None, later_s
                continue
            if command is None:
                return False
            self._busy_since, wait_s = self._clock(), 0
            command()

    def _note_load(self) -> float | None:
        """Keep the latest numbers for whoever asks, and tell who wants to be told; return when to come again."""
        self._stats = self._engine.stats()
        self._load = load = self._engine.load()
        if self._reporter is not None:
            try:
                return self._reporter.note(load, self._engine.num_changes, is_idle=not self._engine.has_unfinished)
            except Exception:  # a listener's mistake ends no request
                logger.exception("the engine's load could not be told")
        return None

    def _shed(self, key: str, error: OverloadedError) -> None:
        """Tell the reader of a request that gave way."""
        with self._lock:
            stream = self._by_key.get(key)
        if stream is not None:
            _call_soon(stream.loop, stream.fail, error)

    def _abort(self, key: str) -> None:
        if not self._engine.abort(key):
            return
        with self._lock:
            stream = self._by_key.get(key)
        if stream is not None:
            _call_soon(stream.loop, stream.abort)

    def _end_answer(self, stream: _Stream, index: int) -> None:
        if self._engine.end_sequence(stream.key, index) and not self._engine.is_unfinished(stream.key):
            _call_soon(stream.loop, stream.close)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Post the step's tokens, in one message per event loop."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, EngineOutput]]] = {}
        with self._lock:
            for output in outputs:
                stream = self._by_key.get(output.request_id)
                if stream is not None:
                    posts.setdefault(stream.loop, []).append((stream, output))
        for loop, post in posts.items():
            if not _call_soon(loop, _put_all, post):
                self._forget(loop)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the requests of an event loop that was closed under its readers."""
        with self._lock:
            self._streams = {name: stream for name, stream in self._streams.items() if stream.loop is not loop}
            orphans = [key for key, stream in self._by_key.items() if stream.loop is loop]
            for key in orphans:
                del self._by_key[key]
        for key in orphans:
            self._engine.abort(key)

    def _die(self, reason: str) -> None:
        with self._lock:
            self._why_dead = reason
            streams = list(self._by_key.values())
        for stream in streams:
            _call_soon(stream.loop, stream.fail, EngineDeadError(reason))


def _put_all(post: list[tuple[_Stream, EngineOutput]]) -> None:
    for stream, output in post:
        stream.put(output)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> bool:
    """Post a callback; False if the loop has closed, so that nobody is left to hear."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if loop.is_closed():
            return False
        raise
    return True

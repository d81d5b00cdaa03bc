"""OutputStreams: the queues between the engine's step thread and its callers on their event loops.

    step thread   publish(outputs)  ->  one message per event loop and step
    event loop    stream.put        ->  queue of one request  ->  await stream.take()

The caller gets its first token at once, and later tokens in batches when it is slower than the engine. Knows threads
and event loops. Does not know the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.outputs import EngineOutput, FinishReason

__all__ = ["OutputStream", "OutputStreams", "post"]


@dataclass(slots=True, eq=False)
class OutputStream:
    """The queue of one request. Its methods run on the caller's event loop; any thread may use ``post`` to call them.

    Attributes:
        request_id: under which the caller knows the request.
        key: the request's id inside the engine. It differs from ``request_id``, which may be used again as soon as its
            caller has gone, while a step still computes the old sequence.
        is_done: the last output was taken.
    """

    request_id: str
    key: str
    replica: str
    loop: asyncio.AbstractEventLoop
    is_done: bool = False
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _outputs: list[EngineOutput] = field(default_factory=list)
    _is_aborted: bool = False  # by a caller: no output has said so
    _is_ended: bool = False  # its last answer was ended by a caller
    _error: Exception | None = None

    def post(self, method: Callable[..., None], *args: object) -> bool:
        """Call one of the methods below on the caller's event loop; False if that is closed."""
        return post(self.loop, method, *args)

    def put(self, output: EngineOutput) -> None:
        """Queue an output."""
        self._outputs.append(output)
        self._ready.set()

    def abort(self) -> None:
        """End the stream with reason ``abort``, after the outputs in the queue."""
        self._is_aborted = True
        self._ready.set()

    def end(self) -> None:
        """End the stream after the outputs in the queue."""
        self._is_ended = True
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the outputs in the queue."""
        self._error = error
        self._ready.set()

    async def take(self) -> list[EngineOutput]:
        """Wait for outputs and return all in the queue, one for each answer; how the stream ended comes after them."""
        await self._ready.wait()
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        if not outputs:
            return self._take_end()
        if self._error is not None or self._is_aborted or self._is_ended:
            self._ready.set()
        self.is_done = any(output.is_last for output in outputs)
        by_answer: dict[int, list[EngineOutput]] = {}
        for output in outputs:
            by_answer.setdefault(output.index, []).append(output)
        return [EngineOutput.join(one, self.replica) for one in by_answer.values()]

    def _take_end(self) -> list[EngineOutput]:
        if self._error is not None:
            raise self._error
        assert self._is_aborted or self._is_ended
        self.is_done = True
        return [EngineOutput(self.key, 0, [], FinishReason.ABORT, replica=self.replica)] if self._is_aborted else []


class OutputStreams:
    """The open streams of one engine: an OutputReader whose tags are the streams.

    Event loops open and close streams, the step thread publishes to them.

    Args:
        replica: name that the outputs carry.
        on_closed_loop: called, in any thread, with an event loop that was closed while it had streams.
    """

    def __init__(self, replica: str, on_closed_loop: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        self._replica = replica
        self._on_closed_loop = on_closed_loop
        self._lock = threading.Lock()  # guards everything below
        self._by_request: dict[str, OutputStream] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_request)

    # --- called from event loops --------------------------------------------------------------------------------

    def open(self, request_id: str) -> OutputStream | None:
        """Return a new stream for a caller on the running event loop; None if the id is in use."""
        with self._lock:
            other = self._by_request.get(request_id)
            if other is not None and not other.loop.is_closed():
                return None
            self._num_opened += 1
            key = f"{request_id}#{self._num_opened}"
            stream = OutputStream(request_id, key, self._replica, asyncio.get_running_loop())
            self._by_request[request_id] = stream
        if other is not None:  # the step thread has not noticed yet
            self._on_closed_loop(other.loop)
        return stream

    def close(self, stream: OutputStream) -> None:
        """Remove a stream whose caller has finished or gone."""
        with self._lock:
            # After its loop was closed, another caller may have taken the id.
            if self._by_request.get(stream.request_id) is stream:
                del self._by_request[stream.request_id]

    def find(self, request_id: str) -> OutputStream | None:
        """Return the stream of a request."""
        with self._lock:
            return self._by_request.get(request_id)

    # --- called from the step thread ----------------------------------------------------------------------------

    def publish(self, outputs: list[tuple[OutputStream, EngineOutput]]) -> None:
        """Queue the outputs of a step in their streams, with one message to each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, EngineOutput]]] = {}
        for stream, output in outputs:
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, pairs in by_loop.items():
            if not post(loop, _put_all, pairs):
                self._on_closed_loop(loop)

    def fail(self, stream: OutputStream, error: Exception) -> None:
        """End a stream with an error."""
        stream.post(stream.fail, error)

    def end(self, stream: OutputStream, *, is_aborted: bool) -> None:
        """End a stream whose request was aborted or ended by a caller."""
        stream.post(stream.abort if is_aborted else stream.end)

    def remove_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Remove the streams of a closed event loop."""
        with self._lock:
            self._by_request = {name: one for name, one in self._by_request.items() if one.loop is not loop}


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> bool:
    """Call a function on an event loop, from any thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if loop.is_closed():
            return False
        raise
    return True


def _put_all(pairs: list[tuple[OutputStream, EngineOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)

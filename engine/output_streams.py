"""OutputStreams: the queues between the engine's step thread and the readers on their event loops.

    step thread   publish(outputs)  ->  one message per event loop and step
    event loop    stream.put        ->  queue of one reader  ->  await stream.take()

A reader gets its first token at once, and later tokens in batches when it is slower than the engine. Knows threads and
event loops. Does not know the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.outputs import EngineOutput, FinishReason

__all__ = ["OutputStream", "OutputStreams", "post"]


@dataclass(slots=True, eq=False)
class OutputStream:
    """The queue of one reader. Its methods run on the reader's event loop; any thread may use ``post`` to call them.

    Attributes:
        request_id: under which the reader knows the request.
        key: the request's id inside the engine. It differs from ``request_id``, which may be used again as soon as its
            reader has gone, while a step still computes the old sequence.
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
        """Call one of the methods below on the reader's event loop; False if that is closed."""
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
    """The open streams of one engine. The step thread and the readers' threads share it.

    Args:
        replica: name that the outputs carry.
        on_closed_loop: called, in any thread, with an event loop that was closed while it had readers.
    """

    def __init__(self, replica: str, on_closed_loop: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        self._replica = replica
        self._on_closed_loop = on_closed_loop
        self._lock = threading.Lock()  # guards everything below
        self._by_request: dict[str, OutputStream] = {}
        self._by_key: dict[str, OutputStream] = {}
        self._num_opened = 0
        self._new_error: Callable[[], Exception] | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, request_id: str) -> OutputStream | None:
        """Return a new stream for a reader on the running event loop; None if the id is in use.

        Raises:
            Exception: the error of ``fail_all``, after that was called.
        """
        with self._lock:
            if self._new_error is not None:
                raise self._new_error()
            other = self._by_request.get(request_id)
            if other is not None and not other.loop.is_closed():
                return None
            self._num_opened += 1
            key = f"{request_id}#{self._num_opened}"
            stream = OutputStream(request_id, key, self._replica, asyncio.get_running_loop())
            self._by_request[request_id] = self._by_key[key] = stream
        if other is not None:  # the step thread has not noticed yet
            self._on_closed_loop(other.loop)
        return stream

    def close(self, stream: OutputStream) -> None:
        """Remove a stream whose reader has finished or gone."""
        with self._lock:
            # After its loop was closed, another reader may have taken the id.
            if self._by_request.get(stream.request_id) is stream:
                del self._by_request[stream.request_id]
            self._by_key.pop(stream.key, None)

    def find(self, request_id: str) -> OutputStream | None:
        """Return the stream of the reader that knows its request by this id."""
        with self._lock:
            return self._by_request.get(request_id)

    def find_key(self, key: str) -> OutputStream | None:
        """Return the stream of the request that the engine knows by this key."""
        with self._lock:
            return self._by_key.get(key)

    def publish(self, outputs: Iterable[EngineOutput]) -> None:
        """Queue the outputs of a step in their streams, with one message to each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, EngineOutput]]] = {}
        with self._lock:
            for output in outputs:
                stream = self._by_key.get(output.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, pairs in by_loop.items():
            if not post(loop, _put_all, pairs):
                self._on_closed_loop(loop)

    def remove_loop(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Remove the streams of a closed event loop and return their keys."""
        with self._lock:
            self._by_request = {name: one for name, one in self._by_request.items() if one.loop is not loop}
            keys = [key for key, stream in self._by_key.items() if stream.loop is loop]
            for key in keys:
                del self._by_key[key]
        return keys

    def fail_all(self, new_error: Callable[[], Exception]) -> None:
        """Fail every open stream, each with an error of its own, and open no further one."""
        with self._lock:
            self._new_error = new_error
            streams = list(self._by_key.values())
        for stream in streams:
            stream.post(stream.fail, new_error())


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

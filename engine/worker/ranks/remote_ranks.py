"""RemoteRanks: rank 0's handle on the processes of ranks 1, 2, ... It does not know models or steps.

Each rank has a connection to rank 0 for calls and replies. A closed socket means that the process at its other end is
dead: a thread here watches the sockets of all ranks, and a thread in every rank watches rank 0's. When one process
dies, for any reason, all of them end.

A rank that fails reports its error and waits until it is ended. In both cases the collectives of the other ranks fail
or are aborted, and rank 0 raises the first cause: a dead process if there is one, else the reported error.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineDeadError, PagodaError
from engine.worker.device import default_num_threads
from engine.worker.ranks.rank_hosts import Rank, RankHosts

__all__ = ["RankFailure", "RemoteRanks"]

logger = logging.getLogger(__name__)

_DEATH_SECONDS = 2.0  # how long a rank's report waits for the death of another rank that may have caused it
_NOTICE_SECONDS = 3.0  # how long an error of rank 0 waits for the failure of another rank that caused it


@dataclass(frozen=True)
class RankFailure:
    """An error that ended a rank, as the rank reports it to rank 0."""

    message: str
    error: PagodaError | None  # rank 0 raises it; None: EngineDeadError with the message
    traceback: str


class RemoteRanks:
    """Ranks 1 to ``tensor_parallel_size`` - 1, started and waiting for calls.

    Args:
        config: options of the engine.
        hosts: where they run; closed with this object.
        abort: makes rank 0's collectives fail when the other ranks have ended; called from any thread, possibly twice.

    Raises:
        PagodaError: if a rank cannot start.
    """

    def __init__(self, config: EngineConfig, hosts: RankHosts, abort: Callable[[], None]) -> None:
        self._size = config.tensor_parallel_size
        self._hosts = hosts
        self._abort = abort
        self._owner = os.getpid()
        self._replies: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()  # None: a rank has failed
        self._failure: PagodaError | None = None
        self._failed = threading.Event()
        self._closing = False
        try:
            self._ranks = hosts.start(self._size)
        except BaseException:
            hosts.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="engine-rank-watcher", daemon=True)
        self._watcher.start()
        with self.together():
            own_threads = None if hosts.own_address else max(1, default_num_threads() // self._size)
            self.send((config, own_threads))
            self.receive()

    # --- calls, from the thread that drives rank 0 ----------------------------------------------------------------

    def send(self, message: object) -> None:
        """Pickle an object and send it to every rank."""
        data = pickle.dumps(message)
        for rank in self._ranks:
            rank.connection.send_bytes(data)

    def receive(self) -> list[Any]:
        """Return one reply from every rank, in the ranks' order.

        Raises:
            PagodaError: the cause, if a rank has ended.
        """
        replies: dict[int, Any] = {}
        while len(replies) < len(self._ranks):
            item = self._replies.get()
            if item is None:
                assert self._failure is not None
                raise self._failure
            replies[item[0]] = item[1]
        return [replies[number] for number in sorted(replies)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of a call that all ranks execute at once: if one fails, all end, and the first cause is raised."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            # A collective may fail on rank 0 a moment before the watcher knows which rank has died.
            if isinstance(error, Exception) and not isinstance(error, PagodaError):
                self._failed.wait(_NOTICE_SECONDS)
            cause = self._failure
            self._failure = cause or EngineDeadError(f"tensor-parallel rank 0 failed: {_describe(error)}")
            self.close()
            if cause is None or cause is error:
                raise
            raise cause from error

    def check_health(self) -> None:
        """Raise the cause if the ranks have ended."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Kill every rank's process and wait for its end."""
        if self._closing or os.getpid() != self._owner:  # a forked copy of this object owns nothing
            return
        self._closing = True
        self._failure = self._failure or EngineDeadError("the engine was closed")
        for rank in self._ranks:
            rank.process.kill()  # a rank has nothing to save
        for rank in self._ranks:
            rank.process.wait()
            _shut(rank.connection)  # a host that is lost does not close it
        if threading.current_thread() is not self._watcher:  # the garbage collector runs in any thread
            self._watcher.join()
        for rank in self._ranks:
            rank.connection.close()
        self._abort()
        self._hosts.close()

    # --- the watcher's thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Queue the replies until a rank fails or its connection ends."""
        poller = select.poll()
        ranks = {rank.connection.fileno(): rank for rank in self._ranks}
        for fd in ranks:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                rank, failure = ranks[fd], None
                try:
                    reply, failure = rank.connection.recv()
                except Exception:  # the connection has ended, perhaps in the middle of a reply
                    return self._end_all(_death_of(rank, self._size))
                if failure is not None:
                    dead = None if failure.error else self._wait_for_a_death(poller, ranks, rank)
                    return self._end_all(_death_of(dead, self._size) if dead else _error_of(rank, failure, self._size))
                self._replies.put((rank.number, reply))

    def _wait_for_a_death(self, poller: select.poll, ranks: dict[int, Rank], reporter: Rank) -> Rank | None:
        """Return the rank whose process has ended, if one does soon: its death makes the collectives of others fail."""
        alive = {fd for fd, rank in ranks.items() if rank is not reporter}  # a rank that reports an error stays alive
        poller.unregister(reporter.connection.fileno())
        deadline = time.monotonic() + _DEATH_SECONDS
        while alive and not self._closing and (remaining_s := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(1000 * remaining_s):
                try:
                    _, failure = ranks[fd].connection.recv()
                except Exception:
                    return ranks[fd]
                if failure is not None:
                    poller.unregister(fd)
                    alive.remove(fd)
        return None

    def _end_all(self, cause: PagodaError) -> None:
        if self._closing:
            return
        self._failure = cause
        self._failed.set()
        self._replies.put(None)
        for other in self._ranks:
            other.process.kill()
        self._abort()


def _death_of(rank: Rank, size: int) -> EngineDeadError:
    """Return the error of a rank whose connection has ended."""
    where = _name(rank, size)
    code = None
    with suppress(subprocess.TimeoutExpired):
        code = rank.process.wait(_DEATH_SECONDS)  # its connection ends a moment before it does
    how = "closed its connection" if code is None else _how_it_ended(code)
    return EngineDeadError(f"{where} {how}; restart the engine")


def _error_of(rank: Rank, failure: RankFailure, size: int) -> PagodaError:
    """Return the error that a rank has reported."""
    where = _name(rank, size)
    logger.error("%s failed\n%s", where, failure.traceback)
    return failure.error or EngineDeadError(f"{where} failed: {failure.message}")


def _name(rank: Rank, size: int) -> str:
    return f"tensor-parallel rank {rank.number} of {size}" + (f" on {rank.host}" if rank.host else "")


def _shut(connection: Connection) -> None:
    """End a connection, so that the thread that waits for its end sees it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (the kernel does so when memory runs out)"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

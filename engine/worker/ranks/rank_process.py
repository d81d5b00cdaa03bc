"""The process of a tensor-parallel rank: it serves rank 0's calls, and ends when rank 0's process ends.

    python -m engine.worker.ranks.rank_process NUMBER FD PARENT DIRECTORY

``OneHost`` starts it like that. FD is the rank's end of the socket pair, PARENT the process id of rank 0, DIRECTORY the
private directory of this engine. On another host, a program calls ``join`` with rank 0's invitation.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from engine.errors import PagodaError
from engine.worker.device import default_num_threads
from engine.worker.model_worker import ModelWorker
from engine.worker.ranks.rank_listener import Invitation
from engine.worker.ranks.remote_ranks import RankFailure


def main(number: int, fd: int, parent: int, directory: str) -> None:
    """Serve calls until rank 0 ends this process; after an error, report it and wait for that end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; rank 0 decides
    watcher = threading.Thread(target=_end_with_parent, args=(fd, parent, directory), daemon=True)
    watcher.start()
    _answer(Connection(fd), number, "")
    watcher.join()


def join(invitation: Invitation, host: str) -> None:
    """Be a rank on a host of its own until rank 0 ends it: then this process ends.

    Args:
        invitation: rank 0's.
        host: this host's address, which the others reach.

    Raises:
        OSError, AssertionError, AuthenticationError: as ``Invitation.accept``.
    """
    connection = invitation.accept(host)
    watcher = threading.Thread(target=_end_with_connection, args=(connection.fileno(),), daemon=True)
    watcher.start()
    _answer(connection, invitation.number, host)
    watcher.join()


def _answer(connection: Connection, number: int, host: str) -> None:
    """Serve calls; after an error, report it."""
    try:
        _serve(number, connection, host)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        typed = error if isinstance(error, PagodaError) else None
        with suppress(OSError):  # rank 0 is gone
            connection.send((None, RankFailure(message, typed, traceback.format_exc())))


def _serve(number: int, connection: Connection, host: str) -> None:
    config, num_threads = pickle.loads(connection.recv_bytes())
    torch.set_num_threads(num_threads or default_num_threads())
    worker = ModelWorker(config, number, host)
    connection.send((None, None))
    while True:
        method, args, wants_reply = pickle.loads(connection.recv_bytes())
        result = getattr(worker, method)(*args)
        if wants_reply:
            connection.send((result, None))


def _end_with_parent(fd: int, parent: int, directory: str) -> None:
    """End this process when rank 0's process is gone, even if a forked copy of that keeps the socket open."""
    poller = select.poll()
    poller.register(fd, 0)  # reports only that the other end was closed
    while not poller.poll(1000) and os.getppid() == parent:
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _end_with_connection(fd: int) -> None:
    """End this process when rank 0 closes the connection, or its host is lost."""
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

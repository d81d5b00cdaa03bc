"""SeveralHosts: each rank on a host of its own, from where it connects to rank 0.

A program that knows the hosts starts the ranks: each runs ``rank_process.join`` with its Invitation.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import TCPStore

from engine.errors import EngineDeadError
from engine.worker.ranks.rank_hosts import Rank, RankHandle
from engine.worker.ranks.rank_listener import Invitation, RankListener, listen

__all__ = ["SeveralHosts"]

_START_SECONDS = 600.0  # a new host may first have to load an image's Python packages from a slow disk


class SeveralHosts:
    """Ranks on hosts of their own.

    Args:
        host: this host's address, which the others reach.
        start_rank: starts a rank somewhere, which is to accept the invitation.
    """

    def __init__(self, host: str, start_rank: Callable[[Invitation], RankHandle]) -> None:
        self.own_address = host
        self._start_rank = start_rank
        with listen(host) as listener:
            port = listener.getsockname()[1]
            # The store of torch listens on all interfaces unless it gets a socket.
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self.rendezvous = f"tcp://{host}:{port}"  # whose last colon is before the port, in IPv6 too

    def start(self, size: int) -> list[Rank]:
        """Start the ranks, and wait for their connections.

        Raises:
            EngineDeadError: if one does not connect in time. None is left then.
        """
        handles, ranks = dict[int, RankHandle](), dict[int, Rank]()
        try:
            with RankListener(self.own_address) as listener:
                for number in range(1, size):
                    handles[number] = self._start_rank(listener.invite(number))
                _connect(listener, handles, ranks)
        except BaseException:
            for handle in handles.values():
                handle.kill()
            for rank in ranks.values():
                rank.connection.close()
            raise
        return [ranks[number] for number in sorted(ranks)]

    def close(self) -> None:
        """Forget the store."""
        del self._store


def _connect(listener: RankListener, handles: dict[int, RankHandle], ranks: dict[int, Rank]) -> None:
    """Wait for the connections of the ranks, and add them to ``ranks``."""
    size, deadline = len(handles) + 1, time.monotonic() + _START_SECONDS
    while missing := handles.keys() - ranks.keys():
        for number, host, connection in listener.take():
            ranks[number] = Rank(number, handles[number], connection, host)
        if problem := _problem(handles, missing - ranks.keys(), deadline):
            number, what = problem
            raise EngineDeadError(f"tensor-parallel rank {number} of {size} {what}")


def _problem(handles: dict[int, RankHandle], missing: set[int], deadline: float) -> tuple[int, str] | None:
    """Return a rank that will not connect, and why."""
    for number in sorted(missing):
        with suppress(subprocess.TimeoutExpired):
            handles[number].wait(0)
            return number, "ended before it connected; its log says why"
    if not missing or time.monotonic() < deadline:
        return None
    return min(missing), f"has not connected for {_START_SECONDS:g} s; let all ports between the hosts be open"

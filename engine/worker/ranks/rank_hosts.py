"""RankHosts: where ranks 1, 2, ... of an engine run, and how rank 0 starts and reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

__all__ = ["Rank", "RankHandle", "RankHosts"]


class RankHandle(Protocol):
    """The process of a rank, as rank 0 sees it."""

    def kill(self) -> None:
        """End it, if it runs."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code when it has ended, negative for a signal; None: that cannot be known here.

        Raises:
            subprocess.TimeoutExpired: if it still runs after ``timeout`` seconds.
        """


@dataclass(frozen=True)
class Rank:
    """A rank that has been started."""

    number: int
    process: RankHandle
    connection: Connection  # for calls and replies; it ends with the process
    host: str = ""  # its host's address; empty: rank 0's own host


class RankHosts(Protocol):
    """Where the ranks of one engine run.

    Attributes:
        own_address: rank 0's host for ranks that have hosts of their own; empty: all ranks share this host, and its
            GPUs and cores.
        rendezvous: where the ranks' collectives find each other: see ``TensorParallel.join``.
    """

    @property
    def own_address(self) -> str: ...

    @property
    def rendezvous(self) -> str: ...

    def start(self, size: int) -> list[Rank]:
        """Start ranks 1 to ``size`` - 1, and return them in order.

        Raises:
            EngineDeadError: if one does not start. None is left then.
        """

    def close(self) -> None:
        """Remove what the ranks shared, after their end."""

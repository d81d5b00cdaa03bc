"""OneHost: all ranks on this host, as processes that this one starts. They share its GPUs and cores."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from engine.errors import EngineDeadError
from engine.worker.ranks.rank_hosts import Rank

__all__ = ["OneHost"]

_SEND_SECONDS = 60  # a rank that accepts no call for this long hangs


class OneHost:
    """Ranks as processes with socket pairs, which meet at a file in a private directory."""

    own_address = ""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="pagoda-ranks-")

    @property
    def rendezvous(self) -> str:
        """The file through which the ranks join each other, in a private directory of this engine."""
        return str(Path(self._directory) / "store")

    def start(self, size: int) -> list[Rank]:
        """Start the ranks in interpreters of their own, which do not import the user's ``__main__`` as spawn would."""
        ranks: list[Rank] = []
        try:
            for number in range(1, size):
                ranks.append(self._start(number))
        except OSError as error:
            _end(ranks)
            what = f"tensor-parallel rank {len(ranks) + 1} of {size} did not start ({error})"
            raise EngineDeadError(f"{what}; raise the limits of processes, memory and open files") from error
        except BaseException:  # Ctrl-C
            _end(ranks)
            raise
        return ranks

    def _start(self, number: int) -> Rank:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        with ours, theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "engine.worker.ranks.rank_process",
                    str(number),
                    str(theirs.fileno()),
                    str(os.getpid()),
                    self._directory,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            return Rank(number, process, Connection(ours.detach()))

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _end(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()
        rank.connection.close()

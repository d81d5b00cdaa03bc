"""LogFollower: prints on the terminal what the replicas on this machine write to Serve's log files.

With Ray's fast settings replicas write to files only: forwarding each line to the terminal through Ray would cost the
ingress more than writing it. Reading the files costs the serving processes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["LogFollower"]

PERIOD_S = 0.5
MAX_READ = 2**20  # bytes of one file at a time


class LogFollower:
    """Follows every ``replica_*.log`` of one directory, including files that appear later.

    Args:
        directory: Serve's log directory.
        show: called with each new line, without its newline.
    """

    def __init__(self, directory: Path, show: Callable[[str], None]) -> None:
        self._directory = directory
        self._show = show
        self._offsets = {path: path.stat().st_size for path in self._files()}  # older lines are not shown
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Show the remaining lines and end the thread, if it was started: a signal may have come before that."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.show_new_lines()
        self.show_new_lines()

    def show_new_lines(self) -> None:
        """Show the new complete lines of all files."""
        for path in self._files():
            try:
                while self._show_some(path):
                    pass
            except OSError:  # the file was renamed meanwhile; the next call reads it
                continue

    def _show_some(self, path: Path) -> bool:
        """Show the next lines of one file; return whether there may be more."""
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            if path.stat().st_size < offset:  # Serve has begun a new file of this name
                offset = 0
            file.seek(offset)
            data = file.read(MAX_READ)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == MAX_READ else b"")
        self._offsets[path] = offset + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._show(line)
        return len(data) == MAX_READ

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("replica_*.log"))

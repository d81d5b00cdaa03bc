"""RivalProcess: a rival in a Python environment of its own, which answers JSON lines over a socket pair.

It knows nothing of routing. The other end of the socket is side.py. The process leads a process group, so a router that
it starts ends with it. What both print goes to a log file, whose last lines errors quote.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.routing.rivals.errors import InvalidReplyError, RivalDiedError, RivalHungError

__all__ = ["RivalProcess"]

ROOT = Path(__file__).resolve().parents[3]
QUOTED = 1_500  # characters of the log in an error
END_S = 20.0  # for the router to end by itself


class RivalProcess:
    """The process; ``with`` ends it."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_s: float = 120.0,
        reply_s: float = 60.0,
    ) -> None:
        """Start ``command``, with the number of its end of the socket as last argument.

        Raises:
            RivalDiedError: if there is no such program.
        """
        self.log, self.start_s, self.reply_s = log, start_s, reply_s
        self._socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as output, theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    cwd=ROOT,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            raise RivalDiedError(f"{command[0]} cannot be started: {error}") from error
        self._buffer = b""

    def __enter__(self) -> RivalProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(end_s=END_S if error is None else 0.0)

    def ask(self, message: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send a message and return its reply. The process may be silent for ``timeout_s``, by default ``reply_s``.

        Raises:
            RivalDiedError: if the process has ended, or reports that its router failed.
            RivalHungError: if it does not answer, or reports that its router does not.
            InvalidReplyError: if the answer is not a JSON object.
        """
        timeout_s = timeout_s or self.reply_s
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._read_line()
        except TimeoutError:
            raise RivalHungError(
                f"the rival did not answer {message['do']!r} within {timeout_s} s; {self._last_lines()}"
            ) from None
        except OSError as error:
            raise self._died() from error
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise InvalidReplyError(
                f"the rival answered {line[:200]!r} to {message['do']!r}, which is not a JSON object"
            )
        if "error" in reply:
            kind = RivalHungError if reply.get("is_timeout") else RivalDiedError
            raise kind(f"the rival's router failed at {message['do']!r}: {reply['error']}; {self._last_lines()}")
        return reply

    def _read_line(self) -> bytes:
        while b"\n" not in self._buffer:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionResetError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> RivalDiedError:
        try:
            code = f"with exit code {self._process.wait(END_S)}"
        except subprocess.TimeoutExpired:
            code = "its connection"
        return RivalDiedError(f"the rival's process ended {code}; {self._last_lines()}")

    def _last_lines(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")[-QUOTED:].strip()
        return f"the end of {self.log}:\n{text}" if text else f"{self.log} is empty"

    def close(self, end_s: float = END_S) -> None:
        """End the process and its router; they are killed if they do not end by themselves within ``end_s``."""
        self._socket.close()  # which it takes as the order to end
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(end_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what is left of its group
        self._process.wait()

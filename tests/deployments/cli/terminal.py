"""Runs a command in a pseudo-terminal, types at it, and reads what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[3]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>]|\r")


class Terminal:
    """`python -m deployments.cli` in a pseudo-terminal of 100 columns; use it in a ``with``.

    Attributes:
        raw: all that the command has written, escape sequences included.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        rows: int = 40,
        command: Sequence[str] = (sys.executable, "-m", "deployments.cli"),
    ) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
        variables = {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **(environment or {})}
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        for name in ("PAGODA_API_KEY", "COLUMNS", "LINES"):
            kept.pop(name, None)
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=cwd,
            env=kept | variables,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        os.close(side)
        self.raw = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)

    @property
    def text(self) -> str:
        """What the command has written, without escape sequences."""
        return _ESCAPES.sub("", self.raw)

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until ``text`` appears in ``self.text`` from ``after`` on; return the position of its end."""
        deadline = time.monotonic() + HANG_S
        while (at := self.text.find(text, after)) < 0:
            assert self._read(), f"ended without {text!r}; it wrote:\n{self.text}"
            assert time.monotonic() < deadline, f"no {text!r}; it wrote:\n{self.text}"
        return at + len(text)

    def type(self, text: str) -> None:
        """Send keys; a line ends with a carriage return."""
        os.write(self._main, text.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Read to the end; return the exit code."""
        while self._read():
            pass
        return self.process.wait(timeout=HANG_S)

    def _read(self) -> bool:
        """Read what comes next; return False at the end."""
        ready, _, _ = select.select([self._main], [], [], HANG_S)
        assert ready, f"nothing came for {HANG_S:g} s; before that:\n{self.text}"
        try:
            data = os.read(self._main, 2**16)
        except OSError:  # Linux: the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


def _heed_interrupts() -> None:
    """Undo what a shell that has started the tests in the background passes on: Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def unwrapped(text: str) -> str:
    """Return a text with single spaces, as one line: how lines wrap depends on the length of paths and numbers."""
    return " ".join(text.split())


def run(*arguments: str, **options: object) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it has shown."""
    with Terminal(*arguments, **options) as terminal:  # type: ignore[arg-type]
        code = terminal.wait()
        return code, terminal.text

"""The terminal: consoles for output and for errors, and characters that its encoding lacks."""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.markup import escape

__all__ = ["escape_unknown_characters", "open_console", "print_error"]

NARROWEST = 100  # columns, where the output is not a terminal


def open_console(*, to_stderr: bool = False) -> Console:
    """Return a console; without a terminal it is wide enough for every table and writes no escape sequences."""
    stream = sys.stderr if to_stderr else sys.stdout
    escape_unknown_characters(stream)
    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    return console


def escape_unknown_characters(stream: object) -> None:
    """Escape characters that the stream's encoding lacks: answers and names of models may have any."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def print_error(message: str) -> None:
    """Print one line, ``pagoda: message``, to stderr."""
    open_console(to_stderr=True).print(f"[red]pagoda:[/red] {escape(message)}", soft_wrap=True)

"""OutputReader: where the step thread delivers the outputs of requests.

An event loop of this process (output_streams.py) is one reader, a connection to another process may be another. Each
request names its reader and a tag by which the reader knows the request.
"""

from __future__ import annotations

from typing import Any, Protocol

from engine.outputs import EngineOutput

__all__ = ["OutputReader"]


class OutputReader(Protocol):
    """Receives the outputs of its requests. Only the step thread calls the methods; they must be quick.

    A request ends with exactly one of: an output with ``is_last``, ``fail``, or ``end``.
    """

    def publish(self, outputs: list[tuple[Any, EngineOutput]]) -> None:
        """Take the outputs of one step, each with its request's tag."""

    def fail(self, tag: Any, error: Exception) -> None:
        """End a request with an error of its own."""

    def end(self, tag: Any, *, is_aborted: bool) -> None:
        """End a request that was aborted, or whose last answer was ended, by a caller."""

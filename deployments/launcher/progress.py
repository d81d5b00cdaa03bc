"""StartProgress: what the launcher reports while a server starts."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

__all__ = ["StartProgress"]


class StartProgress:
    """Takes the reports of one start, from its beginning to its end or failure. This one discards them.

    Attributes:
        needs_logs: whether the replicas' logs are read during the start.
    """

    needs_logs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The server is ready, or has failed."""

    def see_details(self, details: Mapping[str, Any]) -> None:
        """Take what Serve reports of its applications, every two seconds; empty before Serve answers."""

    def see_line(self, line: str) -> None:
        """Take a new line of a replica's log."""

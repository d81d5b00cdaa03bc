"""Finding: what one check has found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "State", "findings_of"]


class State(Enum):
    """How a finding affects a server."""

    OK = "ok"
    NOTE = "note"  # nothing is wrong; a server behaves otherwise than on another machine
    WARNING = "warning"  # a server works, with a loss
    ERROR = "error"  # a server does not start, or does not answer


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        subject: what was checked, in a word or two.
        state: how it affects a server.
        text: what was found.
        remedy: what to do, in the imperative; empty if there is nothing to do.
    """

    subject: str
    state: State
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def findings_of(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Run checks, each with its subject, and yield what they find; one that fails itself is a warning."""
    for subject, check in checks:
        try:
            yield from check()
        except Exception as error:  # e.g. a file of the kernel in an unknown form: the other checks still help
            text = f"cannot be checked: {type(error).__name__}: {error}"
            yield Finding(subject, State.WARNING, text, "report this line with the output of `pagoda --version`")

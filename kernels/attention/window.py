"""Window: which of the earlier keys a layer's queries see, if they do not see all. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Chunk", "Window", "first_key", "most_keys", "sliding_and_chunk"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions are divided into chunks of ``tokens``; a query sees the keys of its own chunk (Llama 4, 2025)."""

    tokens: int

    def __str__(self) -> str:
        """Return it as metrics name it; a sliding window is called by its tokens alone."""
        return f"chunk of {self.tokens}"


Window = int | Chunk  # an int is a sliding window: its length in tokens, the query's own included


def first_key(window: Window | None, position: int) -> int:
    """Return the position of the first key that a query at ``position`` sees; with None it sees all."""
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return position // window.tokens * window.tokens
    return max(0, position - window + 1)


def most_keys(window: Window) -> int:
    """Return how many keys a query sees at most, its own included."""
    return window.tokens if isinstance(window, Chunk) else window


def sliding_and_chunk(window: Window | None) -> tuple[int, int]:
    """Return the tokens of a sliding window and of a chunk, as kernels take them: 0 if there is none."""
    return (0, window.tokens) if isinstance(window, Chunk) else (window or 0, 0)

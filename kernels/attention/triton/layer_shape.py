"""LayerShape: what the Triton attention kernels are compiled for, and the tiles that follow from it.

Tiles and splits follow from a layer's shape and a sequence's own length, never from the batch: what a sequence gets
does not depend on the load, and few variants are compiled. This module imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KEYS_PER_SPLIT", "MAX_SPLITS", "LayerShape", "most_splits"]

KEYS_PER_SPLIT = 256  # of a decode's context, at least: below this the reduction costs more than a program saves
MAX_SPLITS = 16  # of a context: with 8 KV heads, one long context fills a GPU of 128 multiprocessors

_MIN_DOT = 16  # tl.dot takes no smaller dimension
_MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's shape on one rank.

    Attributes:
        group_size: query heads that share a KV head.
        element_size: bytes of an element of queries and keys.
        sliding_window: tokens; None: no window.
    """

    group_size: int
    num_kv_heads: int
    head_dim: int
    element_size: int
    sliding_window: int | None

    @property
    def dim_padded(self) -> int:
        """Elements of a head, padded to a dimension that tl.dot takes."""
        return max(_MIN_DOT, _next_power_of_2(self.head_dim))

    @property
    def keys_per_tile(self) -> int:
        """Keys that a program loads at once; KEYS_PER_SPLIT is a multiple of it."""
        return max(_MIN_DOT, min(64, 16384 // (self.dim_padded * self.element_size)))

    @property
    def decode_rows(self) -> int:
        """Rows of a tile with one query."""
        return max(_MIN_DOT, _next_power_of_2(self.group_size))

    @property
    def prefill_rows(self) -> int:
        """Rows of a tile with several queries."""
        # Products of float32, without tensor cores, need the most registers.
        largest = 32 if self.element_size == 4 else _MAX_ROWS if self.dim_padded <= 128 else 64
        return max(self.decode_rows, largest)

    @property
    def prefill_warps(self) -> int:
        """Warps of a program with several queries: 8 where 4 would spill registers, as `compile_for_gpu` shows."""
        needs_more = self.prefill_rows >= _MAX_ROWS or self.element_size == 4 or self.dim_padded > 128
        return 8 if needs_more else 4


def most_splits(layer: LayerShape, max_seq_len: int) -> int:
    """Return into how many splits a context of at most `max_seq_len` tokens can be divided."""
    span = max_seq_len
    if layer.sliding_window is not None:
        span = min(span, layer.sliding_window + layer.keys_per_tile)  # the first tile may begin before the window
    return max(1, min(MAX_SPLITS, -(-span // KEYS_PER_SPLIT)))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()

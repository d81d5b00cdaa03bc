"""LayerShape: what the Triton attention kernels are compiled for, and the tiles that follow from it.

Tiles and splits follow from a layer's shape and a sequence's own length, never from the batch: what a sequence gets
does not depend on the load, and few variants are compiled. This module imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kernels.attention.window import Window, most_keys

__all__ = ["KEYS_PER_SPLIT", "LayerShape", "heads_per_tile", "most_splits"]

KEYS_PER_SPLIT = 256  # of a decode's context, at least: below this the reduction costs more than a program saves
_PROGRAMS = 128  # with which one long context fills a GPU
_MAX_SPLITS = 16, 128  # of a context, at least and at most

_MIN_DOT = 16  # tl.dot takes no smaller dimension
_MAX_ROWS = 128
_MOST_HEADS = 16  # of a tile that shares a latent: their sums and the latents of a tile are in registers


@dataclass(frozen=True)
class LayerShape:
    """One attention layer's shape on one rank, and what follows from it, which is computed once.

    Attributes:
        group_size: query heads that share a KV head.
        element_size: bytes of an element of queries, and of keys unless these are in FP8.
        window: None: queries see all keys.
        rope_dim: of latents, elements of a key after those that are its value, which are ``head_dim``; 0: no layer has
            latents. With latents that are not expanded, ``group_size`` query heads are a tile, and ``num_kv_heads``
            counts these tiles.
        is_fp8: whether keys and values are in FP8.
        value_dim: of expanded latents, elements of a value; ``rope_dim`` are those of a key that all heads share, and
            ``head_dim`` the others. 0: latents are not expanded.
    """

    group_size: int
    num_kv_heads: int
    head_dim: int
    element_size: int
    window: Window | None
    rope_dim: int = 0
    is_fp8: bool = False
    value_dim: int = 0

    @cached_property
    def rope_padded(self) -> int:
        """The rest of a latent's key, padded to a dimension that tl.dot takes."""
        return max(_MIN_DOT, _next_power_of_2(self.rope_dim)) if self.rope_dim else 0

    @cached_property
    def dim_padded(self) -> int:
        """Elements of a head, padded to a dimension that tl.dot takes; of FP8 it takes half of them at a time."""
        return max(2 * _MIN_DOT if self.is_fp8 else _MIN_DOT, _next_power_of_2(self.head_dim))

    @cached_property
    def value_padded(self) -> int:
        """Elements of a head's value, padded likewise."""
        return max(_MIN_DOT, _next_power_of_2(self.value_dim)) if self.value_dim else self.dim_padded

    @property
    def _widest(self) -> int:
        return max(self.dim_padded, self.value_padded)

    @property
    def key_bytes(self) -> int:
        """Bytes of a key or value of one head, padded, as loaded; of float32 queries, as decoded to registers."""
        return self._widest * (1 if self.is_fp8 and self.element_size == 2 else self.element_size)

    @cached_property
    def keys_per_tile(self) -> int:
        """Keys that a program loads at once; KEYS_PER_SPLIT is a multiple of it.

        Measured on an H200 for heads of 128 elements: with 32 keys both kernels are faster than with 64 or 16.
        """
        return max(_MIN_DOT, min(64, max(8192 // self.key_bytes, min(32, 16384 // self.key_bytes))))

    @cached_property
    def decode_rows(self) -> int:
        """Rows of a tile with one query."""
        return max(_MIN_DOT, _next_power_of_2(self.group_size))

    @cached_property
    def decode_programs(self) -> int:
        """Programs of decodes on a multiprocessor: as many as its shared memory holds the loads of."""
        return 4 if self.keys_per_tile * self.key_bytes <= 8192 else 2

    @cached_property
    def decode_registers(self) -> int | None:
        """Registers of a thread of decodes, at most; None: ptxas chooses.

        With keys in FP8 and Triton 3.6 it would choose 154, with which three of four programs run at a time.
        """
        return 128 if self.is_fp8 and self.element_size == 2 and self.decode_programs == 4 else None

    @cached_property
    def max_splits(self) -> int:
        """Splits of a long context, a power of two: few KV heads, or latents, need more of them to fill a GPU."""
        fewest, most = _MAX_SPLITS
        return min(most, max(fewest, _next_power_of_2(_PROGRAMS // self.num_kv_heads)))

    @cached_property
    def prefill_rows(self) -> int:
        """Rows of a tile with several queries."""
        needs_fewest = self.group_size == 2 or self.group_size & (self.group_size - 1) > 0
        if self.dim_padded > 256 and (needs_fewest if self.rope_dim else self.element_size == 4):
            return self.decode_rows  # with more, ptxas spills registers for sm_100
        if self.element_size == 4 and self.value_dim and self._widest > 128:
            return self.decode_rows  # with more, ptxas spills registers
        # Products of float32, without tensor cores, need the most registers, and so do long latents, and long heads in
        # FP8.
        needs_most = self.element_size == 4 or ((self.rope_dim > 0 or self.is_fp8) and self.dim_padded > 256)
        largest = 32 if needs_most else _MAX_ROWS if self._widest <= 128 else 64
        return max(self.decode_rows, largest)

    @cached_property
    def prefill_warps(self) -> int:
        """Warps of a program with several queries: 8 where 4 would spill registers, as `compile_for_gpu` shows."""
        needs_more = self.prefill_rows >= _MAX_ROWS or self.element_size == 4 or self._widest > 128
        return 8 if needs_more else 4

    @cached_property
    def has_small_heads(self) -> bool:
        """Whether registers suffice for all that makes prefills faster, as `compile_for_gpu` shows."""
        return self.element_size == 2 and self._widest <= 128 and (not self.rope_dim or self.value_dim > 0)

    @cached_property
    def prefill_stages(self) -> int:
        """Depth of the software pipeline of a program with several queries.

        5 is the least at which keys and values are loaded while the last ones are used.
        """
        return 5 if self.has_small_heads else 2


def heads_per_tile(num_heads: int) -> int:
    """Return how many query heads share the loads of latents: a divisor of ``num_heads``."""
    return max(heads for heads in range(1, _MOST_HEADS + 1) if num_heads % heads == 0)


def most_splits(layer: LayerShape, max_seq_len: int) -> int:
    """Return into how many splits a context of at most `max_seq_len` tokens can be divided."""
    span = max_seq_len
    if layer.window is not None:
        span = min(span, most_keys(layer.window) + layer.keys_per_tile)  # the first tile may begin before the window
    return max(1, min(layer.max_splits, -(-span // KEYS_PER_SPLIT)))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()

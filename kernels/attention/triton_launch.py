"""How a step launches the Triton attention kernels: the rows of a tile, and the splits of a decode's context.

Both are compile-time constants, so each pair is a variant that Triton compiles for about a second. They follow from
shapes alone, and `batches_of_every_launch` lists the batches that a warm-up runs so that no step compiles. This module
imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["LaunchConfig", "LayerShape", "batches_of_every_launch", "choose_launch"]

_MIN_DOT = 16  # tl.dot takes no smaller dimension
_MAX_ROWS = 128
_MIN_KEYS_PER_SPLIT = 256  # below this the reduction costs more than another program saves
_MAX_SPLITS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a launch depends on besides the batch: one attention layer's shape on one rank, and its GPU.

    Attributes:
        group_size: query heads that share a KV head.
        element_size: bytes of an element of queries and keys.
        sliding_window: tokens; None: no window.
        num_multiprocessors: of the GPU.
    """

    group_size: int
    num_kv_heads: int
    head_dim: int
    element_size: int
    sliding_window: int | None
    num_multiprocessors: int

    @property
    def dim_padded(self) -> int:
        """Elements of a head, padded to a dimension that tl.dot takes."""
        return max(_MIN_DOT, _next_power_of_2(self.head_dim))

    @property
    def keys_per_tile(self) -> int:
        """Keys that a program loads at once."""
        return max(_MIN_DOT, min(64, 16384 // (self.dim_padded * self.element_size)))


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The compile-time constants that change from step to step.

    Attributes:
        rows: of a tile of queries: `group_size` for each query.
        num_splits: programs that share a decode's context; 1: mixed_kernel computes the step.
    """

    rows: int
    num_splits: int

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return 8 if self.rows >= 128 else 4


def choose_launch(layer: LayerShape, *, num_seqs: int, max_query_len: int, max_seq_len: int) -> LaunchConfig:
    """Return how `layer` is launched for a batch; the arguments are those of AttentionMetadata."""
    return LaunchConfig(_rows(layer, max_query_len), _num_splits(layer, num_seqs, max_query_len, max_seq_len))


def _rows(layer: LayerShape, max_query_len: int) -> int:
    smallest = max(_MIN_DOT, _next_power_of_2(layer.group_size))
    # The largest tile whose sums stay in registers; float32 products, without tensor cores, need the most.
    largest = 32 if layer.element_size == 4 else _MAX_ROWS if layer.dim_padded <= 128 else 64
    return max(smallest, min(_next_power_of_2(max_query_len * layer.group_size), largest))


def _num_splits(layer: LayerShape, num_seqs: int, max_query_len: int, max_seq_len: int) -> int:
    """Return 1 for mixed steps, for short contexts, and for batches that fill the GPU without splits."""
    if max_query_len > 1:
        return 1
    span = min(max_seq_len, layer.sliding_window or max_seq_len)
    programs = _PROGRAMS_PER_MULTIPROCESSOR * layer.num_multiprocessors
    wanted = min(programs // (num_seqs * layer.num_kv_heads), span // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


def batches_of_every_launch(
    layers: Iterable[LayerShape], *, max_query_len: int, max_seq_len: int
) -> list[tuple[int, int]]:
    """Return batches of one sequence, as (query_len, seq_len), that together launch all that any batch launches.

    Args:
        layers: the different shapes of a model's layers.
        max_query_len: tokens of one sequence that a step computes at most.
        max_seq_len: tokens of the longest context.
    """
    layers = set(layers)
    launched: set[tuple[LayerShape, LaunchConfig]] = set()
    batches: list[tuple[int, int]] = []
    for query_len, seq_len in _candidates(max_query_len, max_seq_len):
        launches = {
            (layer, choose_launch(layer, num_seqs=1, max_query_len=query_len, max_seq_len=seq_len)) for layer in layers
        }
        if not launches <= launched:
            batches.append((query_len, seq_len))
            launched |= launches
    return batches


def _candidates(max_query_len: int, max_seq_len: int) -> Iterator[tuple[int, int]]:
    """Yield a batch for every number of rows and every number of splits; one sequence alone is split the most."""
    for query_len in range(1, min(max_query_len, max_seq_len, _MAX_ROWS) + 1):
        yield query_len, query_len
    for num_splits in range(2, min(_MAX_SPLITS, max_seq_len // _MIN_KEYS_PER_SPLIT) + 1):
        yield 1, num_splits * _MIN_KEYS_PER_SPLIT


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()

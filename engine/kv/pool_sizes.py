"""PoolSizes: how many pages each pool of the KV cache has, and how memory is divided between the pools.

Memory is divided for sequences of a typical length. Each takes the blocks of that length, the pages within reach of
each window, and slots for its states: one that it computes with, and some for snapshots.

    one sequence    [ blocks ............................ | window pages .... | state | snapshots ]

Longer sequences run out of blocks first, shorter ones of window pages or slots; what the pools of the others have left
holds cached prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from engine.kv.layer_cache import LayerCache, bytes_per_state, bytes_per_token, windows_of
from kernels.attention.window import Chunk, Window

__all__ = ["PageSizes", "PoolSizes", "pages_in_reach", "smallest"]

_MAX_EMPTY_BLOCKS = 2**17  # where no layer attends to everything, a block is only a name for its tokens


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The pages of each pool, equal on every rank.

    Attributes:
        num_blocks: of the layers that attend to everything.
        num_host_blocks: of the host pool, to which they are evicted.
        num_window_pages: of each window, in the order of ``windows_of``.
        num_slots: states of sequences, and snapshots of them.
        num_snapshots: slots that running sequences leave to snapshots.
        num_host_window_pages: of each window, of its host pool; empty: none.
        num_host_slots: of the host pool of states.
    """

    num_blocks: int
    num_host_blocks: int = 0
    num_window_pages: tuple[int, ...] = ()
    num_slots: int = 0
    num_snapshots: int = 0
    num_host_window_pages: tuple[int, ...] = ()
    num_host_slots: int = 0


@dataclass(frozen=True, slots=True)
class PageSizes:
    """The bytes of a page of each pool on one rank.

    Attributes:
        block: a block of the layers that attend to everything; 0 if there are none.
        windows: each window, in the order of ``windows_of``, and a page of it.
        slot: the states of one sequence.
        block_size: tokens of a block, and of a page.
    """

    block: int
    windows: tuple[tuple[Window, int], ...]
    slot: int
    block_size: int

    @classmethod
    def of(cls, layers: Sequence[LayerCache], block_size: int, element_size: int) -> PageSizes:
        """Return the sizes for what the layers declare, with numbers of ``element_size`` bytes unless they are FP8."""
        return cls(
            block=block_size * bytes_per_token(layers, element_size),
            windows=tuple(
                (window, block_size * bytes_per_token(layers, element_size, window)) for window in windows_of(layers)
            ),
            slot=bytes_per_state(layers),
            block_size=block_size,
        )

    @property
    def one_page_each(self) -> PoolSizes:
        """Pools of one page each."""
        return PoolSizes(1, 0, (1,) * len(self.windows), int(self.slot > 0))

    @property
    def are_blocks_alone(self) -> bool:
        """Whether the pool of blocks is the only one."""
        return not self.windows and not self.slot

    def num_bytes(self, sizes: PoolSizes) -> int:
        """Return the bytes of pools of these sizes on the device."""
        pages = zip(sizes.num_window_pages, self.windows, strict=True)
        in_windows = sum(count * size for count, (_, size) in pages)
        return sizes.num_blocks * self.block + in_windows + sizes.num_slots * self.slot

    def window_pages(self, num_tokens: int) -> tuple[int, ...]:
        """Return the pages of each window that a sequence of ``num_tokens`` needs to decode."""
        num_blocks = -(-num_tokens // self.block_size)
        return tuple(min(num_blocks, pages_in_reach(window, self.block_size)) for window, _ in self.windows)

    def bytes_of_sequence(self, num_tokens: int, num_snapshots: int = 0) -> int:
        """Return the bytes that a sequence of ``num_tokens`` takes, with room for its snapshots."""
        num_blocks, num_slots = -(-num_tokens // self.block_size), (1 + num_snapshots) * (self.slot > 0)
        return self.num_bytes(PoolSizes(num_blocks, 0, self.window_pages(num_tokens), num_slots))

    def divide(
        self,
        memory: int,
        *,
        num_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        max_step_tokens: int,
        num_snapshots: int,
    ) -> PoolSizes:
        """Divide ``memory`` bytes for sequences of ``num_tokens``, at most what ``max_num_seqs`` sequences can use.

        A single sequence of any length fits: each window has the pages in reach and those of a step, or one for each
        block. If memory is too small for that, every block has a page of each window, and none need be freed.

        Args:
            max_model_len: tokens of the longest sequence.
            max_step_tokens: tokens of a step, which write to as many slots of every window before any is freed.
            num_snapshots: of each sequence.

        Returns:
            Pools without a block if memory does not hold one sequence.
        """
        step_pages, most = -(-max_step_tokens // self.block_size), -(-max_model_len // self.block_size)
        left = memory - sum(step_pages * size for _, size in self.windows)
        num_seqs = min(max(left, 0) / self.bytes_of_sequence(num_tokens, num_snapshots), max_num_seqs)
        num_slots = int(num_seqs * (1 + num_snapshots)) if self.slot else 0
        pages = tuple(
            max(int(num_seqs * pages), min(pages_in_reach(window, self.block_size), most)) + step_pages
            for pages, (window, _) in zip(self.window_pages(num_tokens), self.windows, strict=True)
        )
        rest = memory - self.num_bytes(PoolSizes(0, 0, pages, num_slots))
        num_blocks = min(rest // self.block if self.block else _MAX_EMPTY_BLOCKS, max_num_seqs * most)
        is_small = num_seqs < 1 or rest < 0 or num_blocks * self.block_size < num_tokens
        if self.windows and is_small:
            return self._divide_evenly(memory, num_tokens, num_snapshots)
        return PoolSizes(
            num_blocks=0 if is_small else num_blocks,
            num_window_pages=pages,
            num_slots=num_slots,
            num_snapshots=snapshots_left(num_slots, num_snapshots),
        )

    def with_host(self, pools: PoolSizes, memory: int, *, num_tokens: int, num_snapshots: int) -> PoolSizes:
        """Return ``pools`` with host pools, into which ``memory`` bytes are divided as on the device.

        Args:
            num_tokens: of a sequence, a typical one, or shorter if the memory does not hold that.
            num_snapshots: of each sequence.
        """
        while memory < self.bytes_of_sequence(num_tokens, num_snapshots) and num_tokens > 1:
            num_tokens //= 2
        num_seqs = memory / self.bytes_of_sequence(num_tokens, num_snapshots)
        num_slots = int(num_seqs * (1 + num_snapshots)) if self.slot else 0
        pages = tuple(int(num_seqs * count) for count in self.window_pages(num_tokens))
        num_blocks = min(int(num_seqs * -(-num_tokens // self.block_size)), _MAX_EMPTY_BLOCKS)
        if self.block:
            num_blocks = (memory - self.num_bytes(PoolSizes(0, 0, pages, num_slots))) // self.block
        return replace(pools, num_host_blocks=num_blocks, num_host_window_pages=pages, num_host_slots=num_slots)

    def snapshot_interval(self, pools: PoolSizes, configured: int | None) -> int:
        """Return the tokens between two snapshots of a prefill, whole blocks; 0: none are kept.

        Args:
            pools: of the device.
            configured: tokens. None: a full cache has two snapshots for each slot that is left to them, and none takes
                more memory than the blocks since the one before it.
        """
        if not pools.num_snapshots:
            return 0
        if configured is not None:
            return -(-configured // self.block_size) * self.block_size
        blocks_per_slot = -(-self.slot // self.block) if self.block else 1
        return max(-(-pools.num_blocks // (2 * pools.num_snapshots)), blocks_per_slot) * self.block_size

    def _divide_evenly(self, memory: int, num_tokens: int, num_snapshots: int) -> PoolSizes:
        """Divide ``memory`` for one sequence or more, with as many pages of each window as blocks."""
        num_slots = 1 + num_snapshots if self.slot else 0
        of_blocks = self.block + sum(size for _, size in self.windows)
        num_blocks = max(memory - num_slots * self.slot, 0) // of_blocks
        return PoolSizes(
            num_blocks=num_blocks if num_blocks * self.block_size >= num_tokens else 0,
            num_window_pages=(num_blocks,) * len(self.windows),
            num_slots=num_slots,
            num_snapshots=snapshots_left(num_slots, num_snapshots),
        )


def snapshots_left(num_slots: int, num_snapshots: int) -> int:
    """Return how many of ``num_slots`` slots are not for running sequences, at ``num_snapshots`` for each of these.

    Half of the snapshots' slots are lent to sequences that are shorter than memory was divided for.
    """
    return num_slots * num_snapshots // (1 + num_snapshots) // 2 if num_slots > 1 else 0


def pages_in_reach(window: Window, block_size: int) -> int:
    """Return the pages, at most, that hold the tokens which the next token attends to, and its own."""
    if isinstance(window, Chunk):  # which begins with a block, or up to most_before tokens later
        most_before = block_size - gcd(block_size, window.tokens)
        return -(-(most_before + window.tokens) // block_size)
    return -(-(window - 1) // block_size) + 1


def smallest(sizes: Iterable[PoolSizes]) -> PoolSizes:
    """Return the pages of each pool that every rank has memory for."""
    all_sizes = list(sizes)
    return PoolSizes(
        num_blocks=min(rank.num_blocks for rank in all_sizes),
        num_host_blocks=min(rank.num_host_blocks for rank in all_sizes),
        num_window_pages=tuple(map(min, zip(*(rank.num_window_pages for rank in all_sizes), strict=True))),
        num_slots=min(rank.num_slots for rank in all_sizes),
        num_snapshots=min(rank.num_snapshots for rank in all_sizes),
    )

"""SdpaPlan: how sdpa.py divides one step's batch: what is gathered together, and which queries see which keys.

The plan follows from the metadata alone, so it is made once a step and used by every layer. This module knows block
tables and positions; it never sees a query, a key or a value.

Decodes are gathered together by similar context length, because a short context beside a long one would be padded to
its length. A longer query (a chunk of a prefill) is cut into tiles of queries, which do not cross the borders of
attention chunks. A tile sees a slice of its sequence's gathered keys, so little is computed that causality or a sliding
window then masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.attention.window import Chunk, Window, first_key, most_keys
from kernels.attention_metadata import AttentionMetadata

QUERIES_PER_TILE = 256
_KEYS_PER_GATHER = 4096  # 8 MiB of K at 8 heads of 128 in bf16: gathered keys are still in the cache when they are read
_PADDING_ALLOWED = 128  # keys: below this, one call with padding is cheaper than two without


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query each whose contexts are gathered side by side, padded to the longest."""

    query_rows: torch.Tensor  # int64 [num_seqs]
    slots: torch.Tensor  # int64 [num_seqs * longest]
    visible: torch.Tensor | None  # bool [num_seqs, 1, 1, longest]; None: nothing is padded


@dataclass(frozen=True)
class PrefillTile:
    """Queries of one sequence and the gathered keys they may see; the last query's own key is the last of them."""

    query_rows: slice
    keys: slice  # of the Prefill's slots


@dataclass(frozen=True)
class Prefill:
    """A sequence with several queries. With `is_causal` its one tile is the whole context, a plain causal triangle."""

    slots: torch.Tensor  # int64 [num_keys]
    tiles: tuple[PrefillTile, ...]
    is_causal: bool


@dataclass(frozen=True)
class SdpaPlan:
    """One step's work. Rows that no group and no tile covers belong to padding sequences."""

    decode_groups: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]
    covers_all_rows: bool


@dataclass(frozen=True)
class _Sequence:
    """One sequence of the batch that has something to attend to."""

    index: int
    first_row: int
    query_len: int
    seq_len: int
    first_key: int  # position of the first key that any of its queries sees

    @property
    def first_query(self) -> int:
        return self.seq_len - self.query_len

    @property
    def num_keys(self) -> int:
        return self.seq_len - self.first_key


def make_plan(metadata: AttentionMetadata, block_size: int, window: Window | None) -> SdpaPlan:
    """Divide the batch of `metadata` for layers with this block size (tokens) and window."""
    sequences = list(_live_sequences(metadata, block_size, window))
    decodes = [sequence for sequence in sequences if sequence.query_len == 1]
    prefills = [sequence for sequence in sequences if sequence.query_len > 1]
    tables = metadata.block_tables.long()
    return SdpaPlan(
        tuple(_decode_group(group, tables, block_size) for group in _by_length(decodes)),
        tuple(_prefill(sequence, tables, block_size, window) for sequence in prefills),
        sum(sequence.query_len for sequence in sequences) == metadata.slot_mapping.shape[0],
    )


def _live_sequences(metadata: AttentionMetadata, block_size: int, window: Window | None) -> Iterator[_Sequence]:
    bounds, tables = metadata.cu_seqlens_q.tolist(), metadata.block_tables
    for index, seq_len in enumerate(metadata.seq_lens.tolist()):
        query_len = bounds[index + 1] - bounds[index]
        is_padding = seq_len == 0 or int(tables[index, (seq_len - 1) // block_size]) < 0
        if query_len > 0 and not is_padding:
            yield _Sequence(index, bounds[index], query_len, seq_len, first_key(window, seq_len - query_len))


def _by_length(decodes: list[_Sequence]) -> Iterator[list[_Sequence]]:
    group: list[_Sequence] = []
    for sequence in sorted(decodes, key=lambda sequence: -sequence.num_keys):
        if group:
            longest = group[0].num_keys
            padding = longest - sequence.num_keys
            if (len(group) + 1) * longest > _KEYS_PER_GATHER or padding > max(longest // 2, _PADDING_ALLOWED):
                yield group
                group = []
        group.append(sequence)
    if group:
        yield group


def _decode_group(group: list[_Sequence], tables: torch.Tensor, block_size: int) -> DecodeGroup:
    longest = group[0].num_keys
    seq_lens = torch.tensor([sequence.seq_len for sequence in group])[:, None]
    first_keys = torch.tensor([sequence.first_key for sequence in group])[:, None]
    positions = first_keys + torch.arange(longest)  # [num_seqs, longest]
    visible = positions < seq_lens
    # Padding repeats the sequence's own last key: an unwritten slot may hold NaN, which no mask removes.
    positions = positions.minimum(seq_lens - 1)
    blocks = tables[[sequence.index for sequence in group]].gather(1, positions // block_size)
    slots = blocks * block_size + positions % block_size
    is_padded = group[-1].num_keys < longest
    query_rows = torch.tensor([sequence.first_row for sequence in group])
    return DecodeGroup(query_rows, slots.view(-1), visible[:, None, None, :] if is_padded else None)


def _prefill(sequence: _Sequence, tables: torch.Tensor, block_size: int, window: Window | None) -> Prefill:
    positions = torch.arange(sequence.first_key, sequence.seq_len)
    slots = tables[sequence.index][positions // block_size] * block_size + positions % block_size
    is_causal = sequence.query_len == sequence.seq_len <= (sequence.seq_len if window is None else most_keys(window))
    rows_per_tile = sequence.query_len if is_causal else QUERIES_PER_TILE
    tiles = tuple(_tile(sequence, start, end, window) for start, end in _tile_bounds(sequence, rows_per_tile, window))
    return Prefill(slots, tiles, is_causal)


def _tile_bounds(sequence: _Sequence, rows_per_tile: int, window: Window | None) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each tile's queries, which are all in one attention chunk if there are chunks."""
    start = 0
    while start < sequence.query_len:
        end = min(start + rows_per_tile, sequence.query_len)
        if isinstance(window, Chunk):
            end = min(end, first_key(window, sequence.first_query + start) + window.tokens - sequence.first_query)
        yield start, end
        start = end


def _tile(sequence: _Sequence, start: int, end: int, window: Window | None) -> PrefillTile:
    first = first_key(window, sequence.first_query + start)
    return PrefillTile(
        slice(sequence.first_row + start, sequence.first_row + end),
        slice(first - sequence.first_key, sequence.first_query + end - sequence.first_key),
    )

"""Expanded latents: on GPUs, long prefills attend to keys and values that are computed from the cached latents.

Latent attention is absorbed elsewhere: the matrices that make a head's keys and values of latents multiply its queries
and its output instead, and all heads read one latent. That takes more products for each pair of a query and a key, and
none for a key alone. Here the sequences of a step are divided into parts of either kind. An expanded part is computed
for some heads at a time, so that its workspace is bounded whatever the context:

    pages of the sequences --gather--> latents --kv_b_proj of some heads--> keys and values --prefill kernel--> output

The gathered latents and the keys and values are a paged cache like any other, whose blocks are in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from engine.models.config.shapes.latent import LatentShape
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.registry import LARGEST_HEAD_DIM
from kernels.attention.step_cache import StepCache
from kernels.attention_metadata import AttentionMetadata
from kernels.device_copy import to_device

__all__ = ["LatentPart", "attend_expanded", "longest_expanded", "parts_of"]

WORKSPACE_BYTES = 256 * 2**20  # of latents, keys and values that are computed at once

# The prefill kernel has a program for a head and so many queries, and does not divide keys: with fewer programs most of
# a GPU would be idle, and attention to latents, which has more of them, would be faster despite its products.
_QUERIES_OF_PROGRAM = 128
_LEAST_PROGRAMS = 48


@dataclass(frozen=True, eq=False)
class LatentPart:
    """Consecutive sequences of a step.

    Attributes:
        tokens: where their tokens are in the step.
        metadata: their batch; if they are expanded, that of the workspace.
        block_ids: int32, the blocks of the cache that the workspace holds, in order; None: they are absorbed.
    """

    tokens: slice
    metadata: AttentionMetadata
    block_ids: torch.Tensor | None = None


_PARTS: StepCache[tuple[LatentShape, int, int, int], list[LatentPart]] = StepCache()


def parts_of(
    metadata: AttentionMetadata, shape: LatentShape, num_heads: int, latents: torch.Tensor
) -> list[LatentPart]:
    """Divide a step, once for all layers with a cache like ``latents`` [num_blocks, block_size, rank + rope_dim].

    No launch depends on what only the device knows: steps that CUDA graphs replay with other lengths are absorbed.
    """
    key = shape, num_heads, latents.shape[1], latents.element_size()
    # A whole step is made anew: kept, it would keep its own key alive.
    return _PARTS.get(metadata, key, lambda: list(_divide(metadata, *key))) or [LatentPart(slice(None), metadata)]


def longest_expanded(shape: LatentShape, block_size: int, itemsize: int) -> int:
    """Return the tokens of the longest context that is expanded.

    The workspace must have room for one head, and an indexer must choose all tokens.
    """
    longest = WORKSPACE_BYTES // (itemsize * _elements(shape, num_heads=1) * block_size) * block_size
    return longest if shape.index is None else min(longest, shape.index.top_k)


def _elements(shape: LatentShape, num_heads: int) -> int:
    """Return the elements of a token in the workspace."""
    return shape.rank + shape.rope_dim + num_heads * (shape.nope_dim + shape.value_dim)


def _most_heads(shape: LatentShape, num_tokens: int, itemsize: int) -> int:
    """Return for how many heads the workspace has room, beside the latents of as many tokens."""
    of_token = WORKSPACE_BYTES // (itemsize * num_tokens) - _elements(shape, num_heads=0)
    return max(1, of_token // (shape.nope_dim + shape.value_dim))


def _heads_at_once(num_heads: int, most: int) -> int:
    """Return how many heads are computed at once, in groups of nearly equal size of at most ``most``."""
    return -(-num_heads // -(-num_heads // most))


def _fills_gpu(query_len: int, num_heads: int, most_heads: int) -> bool:
    """Return whether all heads fit into the workspace, or those that are computed at once have enough programs."""
    programs = _heads_at_once(num_heads, most_heads) * -(-query_len // _QUERIES_OF_PROGRAM)
    return most_heads >= num_heads or programs >= _LEAST_PROGRAMS


def _is_faster(shape: LatentShape, query_len: int) -> bool:
    """Return whether ``query_len`` queries of one sequence take fewer products with keys and values than with latents.

    Each query saves products with each key, and each key and value costs ``rank`` products for each of its elements.
    The queries' own absorption, which expansion saves too, is left out: it costs as much as their own keys and values.
    DeepSeek's sizes need 171 queries.
    """
    saved = (shape.rank + shape.rope_dim + shape.rank) - (shape.nope_dim + shape.rope_dim + shape.value_dim)
    fits = 0 < shape.nope_dim <= min(shape.rank, LARGEST_HEAD_DIM) and shape.value_dim <= LARGEST_HEAD_DIM
    return fits and query_len * saved > shape.rank * (shape.nope_dim + shape.value_dim)


# --- the parts of a step ---------------------------------------------------------------------------------------------


def _divide(
    metadata: AttentionMetadata, shape: LatentShape, num_heads: int, block_size: int, itemsize: int
) -> Iterator[LatentPart]:
    """Yield the parts of a step; none if it is absorbed as a whole."""
    lengths, num_decodes = metadata.host_lens, metadata.num_decodes
    longest = longest_expanded(shape, block_size, itemsize)
    sizes = [0] * num_decodes  # tokens of the workspace; 0: a sequence is absorbed
    for query_len, seq_len in lengths:
        size = _num_blocks(seq_len, block_size) * block_size
        expands = _is_faster(shape, query_len) and seq_len <= longest
        expands = expands and _fills_gpu(query_len, num_heads, _most_heads(shape, size, itemsize))
        sizes.append(size if expands else 0)
    if not any(sizes):
        return
    room = WORKSPACE_BYTES // (itemsize * _elements(shape, num_heads))  # tokens whose heads are expanded all at once
    bounds = [*range(num_decodes), *accumulate((query_len for query_len, _ in lengths), initial=num_decodes)]
    for first, end in _runs(sizes, room):
        part = _own_part(metadata, first, end, bounds)
        yield (
            _in_workspace(part, lengths[first - num_decodes : end - num_decodes], block_size) if sizes[first] else part
        )


def _runs(sizes: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of runs of sequences of one kind; several are expanded together if ``room`` has their tokens."""
    first = 0
    for end in range(1, len(sizes) + 1):
        has_next = end < len(sizes) and bool(sizes[end]) == bool(sizes[first])
        if not has_next or (sizes[first] and sum(sizes[first : end + 1]) > room):
            yield first, end
            first = end


def _own_part(metadata: AttentionMetadata, first: int, end: int, bounds: list[int]) -> LatentPart:
    """Return some sequences of a step, whose tokens begin at ``bounds``."""
    tokens, own = slice(bounds[first], bounds[end]), slice(first, end)
    part = replace(
        metadata,
        slot_mapping=metadata.slot_mapping[tokens],
        cu_seqlens_q=metadata.cu_seqlens_q[first : end + 1] - bounds[first],
        seq_lens=metadata.seq_lens[own],
        block_tables=metadata.block_tables[own],
        num_decodes=0 if first else metadata.num_decodes,  # they come first, and are absorbed
        host_lens=(),
    )
    return LatentPart(tokens, part)


def _in_workspace(part: LatentPart, lengths: Sequence[tuple[int, int]], block_size: int) -> LatentPart:
    """Return the part with its context in the workspace."""
    counts = [_num_blocks(seq_len, block_size) for _, seq_len in lengths]
    tables = np.full((len(counts), max(counts)), -1, dtype=np.int32)
    for row, count, end in zip(tables, counts, accumulate(counts), strict=True):
        row[:count] = range(end - count, end)
    own = part.metadata.block_tables
    return replace(
        part,
        metadata=replace(part.metadata, block_tables=to_device(tables, None, own.device)),
        block_ids=torch.cat([row[:count] for row, count in zip(own, counts, strict=True)]),
    )


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


# --- attention of a part ---------------------------------------------------------------------------------------------


def attend_expanded(
    part: LatentPart,
    layer: AttentionInputs,
    weight: torch.Tensor,
    shape: LatentShape,
    backend: AttentionBackend,
    output: torch.Tensor,
) -> None:
    """Compute attention of an expanded part.

    Args:
        part: the sequences.
        layer: a layer's latents; before the rotated elements its queries have those without positions.
        weight: the matrices of the heads, as ``HeadMatrices`` has them.
        output: [num_tokens, num_heads, value_dim].
    """
    gathered, rest = _gather(part, layer.key_cache.squeeze(2))
    matrices = weight.view(layer.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
    most_heads = _most_heads(shape, gathered.shape[:2].numel(), gathered.element_size())
    at_once = _heads_at_once(layer.num_heads, most_heads)
    for first in range(0, layer.num_heads, at_once):
        heads = slice(first, min(first + at_once, layer.num_heads))
        by_head = _expand(gathered, matrices[heads], rest)
        inputs = replace(
            layer,
            query=layer.query[part.tokens, heads, shape.rank - shape.nope_dim :],
            key_cache=by_head[..., : shape.nope_dim],
            value_cache=by_head[..., shape.nope_dim :],
            metadata=part.metadata,
            rope_cache=gathered.unsqueeze(2)[..., shape.rank :],
            topk_slots=None,
        )
        output[part.tokens, heads] = backend.forward(inputs)


def _gather(part: LatentPart, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part's blocks of ``latents`` in the workspace, and the rest of the workspace.

    The workspace always has its full size, so the warm-up measures its peak.
    """
    assert part.block_ids is not None
    workspace = latents.new_empty(WORKSPACE_BYTES // latents.element_size())
    size = (len(part.block_ids), *latents.shape[1:])
    gathered, rest = workspace.tensor_split([len(part.block_ids) * latents[0].numel()])
    return torch.index_select(latents, 0, part.block_ids, out=gathered.view(size)), rest


def _expand(gathered: torch.Tensor, matrices: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the keys and values of some heads, in ``rest``.

    Args:
        gathered: [num_blocks, block_size, rank + rope_dim].
        matrices: [num_heads, nope_dim + value_dim, rank].

    Returns:
        [num_blocks, block_size, num_heads, nope_dim + value_dim].
    """
    num_heads, head_width, rank = matrices.shape
    latents = gathered.flatten(0, 1)[:, :rank]
    expanded = rest[: len(latents) * num_heads * head_width].view(len(latents), -1)
    torch.mm(latents, matrices.flatten(0, 1).T, out=expanded)
    return expanded.view(*gathered.shape[:2], num_heads, head_width)

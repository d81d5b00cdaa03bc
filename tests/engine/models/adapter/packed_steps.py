"""Steps of packed tokens for a decoder, without an engine."""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import without_windows
from engine.kv.pool_sizes import PoolSizes
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.forward_context import ForwardContext
from kernels.attention.base import AttentionBackend
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention_metadata import AttentionMetadata, leading_decodes
from kernels.recurrent_metadata import RecurrentMetadata

BLOCK_SIZE = 4
Chunk = tuple[int, int, int]  # of a sequence: its index, and its first and last token, the last excluded

# Of three sequences: whole prompts beside chunks, chunks after chunks, and decodes, in changing order.
STEPS: list[list[Chunk]] = [
    [(0, 0, 7), (1, 0, 20)],
    [(2, 0, 1), (0, 7, 18), (1, 20, 21)],
    [(1, 21, 22), (2, 1, 14), (0, 18, 19)],
    [(0, 19, 20), (2, 14, 15), (1, 22, 23)],
]
LENGTHS = (20, 23, 15)


def make_sequences() -> list[torch.Tensor]:
    """Return the token ids of the sequences that STEPS computes."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 120, (length,), generator=generator) for length in LENGTHS]


@torch.inference_mode()
def packed_logits(
    decoder: TransformersDecoder | Decoder | CpuDecoder,
    sequences: list[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    steps: list[list[Chunk]] = STEPS,
    backend: AttentionBackend | None = None,
) -> list[torch.Tensor]:
    """Compute the steps; return the logits of every token, [length, vocab_size] for each sequence.

    A sequence that has no chunk has no logits.
    """
    num_blocks = -(-max(map(len, sequences)) // BLOCK_SIZE)
    cache = KVCache(
        without_windows(decoder.layer_caches),
        PoolSizes(len(sequences) * num_blocks, num_slots=1 + len(sequences)),
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = backend or CpuBackend()
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        token_ids = torch.cat([sequences[index][start:stop] for index, start, stop in step])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in step])
        metadata = _metadata(step, len(sequences), num_blocks)
        hidden = decoder(
            token_ids,
            positions,
            ForwardContext(backend, metadata, cache, recurrent=_recurrent(step)),
        )
        logits = decoder.compute_logits(hidden, torch.arange(len(token_ids)))
        assert logits is not None
        counts = [stop - start for _, start, stop in step]
        for (index, _, _), part in zip(step, torch.split(logits, counts), strict=True):
            parts[index].append(part.clone())  # the next step may overwrite it
    return [torch.cat(part) for part in parts if part]


def _metadata(step: list[Chunk], num_sequences: int, num_blocks: int) -> AttentionMetadata:
    tables = [[index + num_sequences * block for block in range(num_blocks)] for index in range(num_sequences)]
    slots = [
        tables[index][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for index, start, stop in step
        for position in range(start, stop)
    ]
    counts = [stop - start for _, start, stop in step]
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        seq_lens=torch.tensor([stop for _, _, stop in step], dtype=torch.int32),
        block_tables=torch.tensor([tables[index] for index, _, _ in step], dtype=torch.int32),
        num_decodes=leading_decodes(counts),
        max_query_len=max(counts),
        max_seq_len=max(stop for _, _, stop in step),
        host_lens=tuple((stop - start, stop) for _, start, stop in step[leading_decodes(counts) :]),
    )


def _recurrent(step: list[Chunk]) -> RecurrentMetadata:
    """Return where each sequence's states are: in the slot after its index."""
    counts = [stop - start for _, start, stop in step]
    integers = torch.int32
    return RecurrentMetadata(
        cu_seqlens=torch.tensor([0, *accumulate(counts)], dtype=integers),
        slots=torch.tensor([index + 1 for index, _, _ in step], dtype=integers),
        starts=torch.tensor([start == 0 for _, start, _ in step], dtype=integers),
        save_tokens=torch.empty(0, dtype=integers),
        save_slots=torch.empty(0, dtype=integers),
        num_decodes=leading_decodes(counts),
    )

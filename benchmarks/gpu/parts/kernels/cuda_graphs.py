"""Attention captured in a CUDA graph and replayed for other sequences, against the reference.

The engine captures its decodes once for each batch size, and replays them with new queries, lengths and block tables in
the same tensors, up to the lengths that the capture was made for. The part `tokens` checks whole steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu.backends import usable_backends
from benchmarks.gpu.inputs.paged_batch import PADDING, HeadShape, Lengths, chunked_reference, make_inputs, worst_error
from benchmarks.gpu.run.part_run import PartRun
from benchmarks.gpu.timing.graphs import captured
from kernels.attention.base import AttentionBackend, AttentionInputs

__all__ = ["run"]


def run(part: PartRun) -> None:
    """Capture decodes and mixed steps, then replay them with shorter contexts, other blocks and padding."""
    if not part.on_gpu:
        part.record("note", "CUDA graphs need a GPU; on a CPU each step is computed again")
    for backend in usable_backends(part):
        for num_heads, num_kv_heads, head_dim in part.sizes.attention:
            shape = HeadShape(num_heads, num_kv_heads, head_dim, backend.default_block_size)
            for name, (before, after) in _changes(part.sizes.context).items():
                error = _replayed_error(part, backend, shape, before, after)
                part.record(f"{backend.name}, {num_heads}/{num_kv_heads} heads, {name}", min(error, 1e9))
                if not error <= 1.0:
                    part.fault(f"{backend.name}, {shape}, {name}: {error:.3g} x tolerance after a replay")


def _changes(context: int) -> dict[str, tuple[Lengths, Lengths]]:
    """Return the lengths at capture and at replay; queries keep their number, as in a graph for one batch size."""
    eighth = context // 8
    return {
        "long decode": ([(1, context)], [(1, eighth + 5)]),
        "4 decodes": ([(1, context // 2)] * 4, [(1, 1), (1, eighth), PADDING, (1, context // 2 - 9)]),
        "64 decodes": ([(1, eighth)] * 64, [(1, 1 + 7 * i % eighth) for i in range(60)] + [PADDING] * 4),
        "mixed": ([(16, eighth)] * 3, [(1, eighth - 7), (30, 64), (17, 20)]),
    }


def _replayed_error(
    part: PartRun, backend: AttentionBackend, shape: HeadShape, before: Lengths, after: Lengths
) -> float:
    """Return the error of a replay with the lengths ``after`` of what was captured with ``before``."""
    inputs = make_inputs(before, shape, part.device)
    inputs = replace(inputs, metadata=replace(inputs.metadata, max_query_len=max(query for query, _ in before + after)))
    outputs: list[torch.Tensor] = []
    replay = captured(lambda: outputs.append(backend.forward(inputs)), part.device)
    _overwrite(inputs, make_inputs(after, shape, part.device, seed=1))
    for output in outputs:
        output.fill_(torch.nan)
    replay()
    return worst_error(outputs[-1], chunked_reference(inputs))


def _overwrite(inputs: AttentionInputs, new: AttentionInputs) -> None:
    """Put another batch into the same tensors, as far as it has blocks."""
    blocks, width = new.key_cache.shape[0], new.metadata.block_tables.shape[1]
    inputs.query.copy_(new.query)
    inputs.key_cache[:blocks].copy_(new.key_cache)
    inputs.value_cache[:blocks].copy_(new.value_cache)
    inputs.metadata.block_tables.fill_(-1)
    inputs.metadata.block_tables[:, :width].copy_(new.metadata.block_tables)
    inputs.metadata.seq_lens.copy_(new.metadata.seq_lens)
    inputs.metadata.cu_seqlens_q.copy_(new.metadata.cu_seqlens_q)

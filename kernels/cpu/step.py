"""Computing a step in C (csrc/layer/layer.h): decoder layers, all at once or a half at a time, and the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu.bindings import CStep, address, pointers
from kernels.cpu.layer import PackedLayer
from kernels.cpu.library import require
from kernels.cpu.linear import PackedLinear
from kernels.cpu.scratch import Scratch

__all__ = ["CpuStep", "add_attention", "add_mlp", "all_layers", "attention_half", "logits", "mlp_half"]


class CpuStep:
    """One step's batch for the kernels.

    Args:
        hidden: float32 [num_tokens, hidden_size], the residual stream, which the halves add to.
        positions: int64 [num_tokens].
        metadata: the step's attention.
        block_size: tokens in a KV block.
        scratch: grows to the step's size if necessary.
        addend: like ``hidden``; if given, the halves write there what tensor-parallel ranks must sum and add.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        scratch: Scratch,
        addend: torch.Tensor | None = None,
    ) -> None:
        scratch.reserve(hidden.shape[0])
        block_tables = metadata.block_tables
        assert hidden.is_contiguous()
        assert block_tables.is_contiguous()
        assert block_tables.dtype == metadata.cu_seqlens_q.dtype == metadata.seq_lens.dtype == torch.int32
        assert positions.dtype == metadata.slot_mapping.dtype == torch.int64
        # The structure holds addresses only, so these tensors must live as long as it does.
        self._kept = (hidden, positions, metadata, addend)
        self.c_step = CStep(
            hidden.data_ptr(),
            address(addend),
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            metadata.cu_seqlens_q.data_ptr(),
            metadata.seq_lens.data_ptr(),
            block_tables.data_ptr(),
            hidden.shape[0],
            metadata.num_seqs,
            block_tables.shape[1],
            block_size,
            scratch.words.data_ptr(),
            scratch.row_scales.data_ptr(),
            scratch.wide.data_ptr(),
            scratch.query.data_ptr(),
            scratch.attended.data_ptr(),
        )


def attention_half(layer: PackedLayer, step: CpuStep, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Add a layer's attention to the hidden states, storing the step's keys and values in the cache first.

    The caches are [num_blocks, block_size, num_kv_heads, head_dim].
    """
    require().pagoda_attention_half(layer.c_layer, step.c_step, key_cache.data_ptr(), value_cache.data_ptr())


def mlp_half(layer: PackedLayer, step: CpuStep) -> None:
    """Add a layer's feed-forward to the hidden states."""
    require().pagoda_mlp_half(layer.c_layer, step.c_step)


def add_attention(layer: PackedLayer, hidden: torch.Tensor, attended: torch.Tensor) -> None:
    """Add to the hidden states what the ranks' attention halves wrote to their addends, summed."""
    _add(layer, hidden, attended, layer.c_layer.attention_output_norm)


def add_mlp(layer: PackedLayer, hidden: torch.Tensor, computed: torch.Tensor) -> None:
    """Add to the hidden states what the ranks' feed-forward halves wrote to their addends, summed."""
    _add(layer, hidden, computed, layer.c_layer.mlp_output_norm)


def _add(layer: PackedLayer, hidden: torch.Tensor, addend: torch.Tensor, norm: int | None) -> None:
    assert hidden.is_contiguous()
    assert addend.is_contiguous()
    assert hidden.dtype == addend.dtype == torch.float32
    shape = layer.c_layer
    require().pagoda_add_to_residual(
        hidden.data_ptr(), addend.data_ptr(), *hidden.shape, norm, shape.eps, shape.residual_multiplier
    )


def all_layers(layers: Sequence[PackedLayer], step: CpuStep, caches: Sequence[tuple[torch.Tensor, ...]]) -> None:
    """Compute both halves of every layer in one call; ``caches`` are each layer's keys and values.

    A call releases the interpreter's lock and waits for it at the end: with one call a layer, an event loop in the same
    process would delay a step at every layer.
    """
    require().pagoda_layers(
        pointers([layer.c_layer for layer in layers]),
        len(layers),
        step.c_step,
        pointers([keys for keys, _ in caches]),
        pointers([values for _, values in caches]),
    )


def logits(
    output: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    head: PackedLinear,
    scratch: Scratch,
    softcap: float | None = None,
) -> None:
    """Write the float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size] to ``output``.

    With a ``softcap`` C they are C * tanh(logits / C).
    """
    assert hidden.is_contiguous()
    assert hidden.dtype == torch.float32
    num_rows = hidden.shape[0]
    scratch.reserve(num_rows)
    require().pagoda_logits(
        output.data_ptr(),
        hidden.data_ptr(),
        num_rows,
        norm.data_ptr(),
        eps,
        head.c_weight,
        softcap or 0.0,
        scratch.words.data_ptr(),
        scratch.row_scales.data_ptr(),
    )

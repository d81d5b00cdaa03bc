"""Decoder layers, all at once or a half at a time, and the logits as calls of the C kernels (csrc/layer.h)."""

from __future__ import annotations

import ctypes

import torch

from kernels.attention import AttentionMetadata
from kernels.cpu.library import pointer, require
from kernels.cpu.linear import CWeight, PackedLinear, WeightKind, words_per_row
from kernels.cpu.memory import huge_zeros

__all__ = ["CLayer", "CpuStep", "Scratch", "all_layers", "attention_half", "logits", "mlp_half"]


class CLayer(ctypes.Structure):
    """``pagoda_layer``."""

    _fields_ = (
        ("qkv", CWeight),
        ("output", CWeight),
        ("gate_up", CWeight),
        ("down", CWeight),
        ("input_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class CStep(ctypes.Structure):
    """``pagoda_step``."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("rope", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("words", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
    )


class Scratch:
    """Memory for what lives within a layer: kept from step to step, since fresh memory costs its page faults.

    Args:
        kind: of the weights.
        width: elements of the widest row that a linear layer of the model reads.
        outputs: elements of the widest row that one writes.
        attention_width: elements of a token's queries.
        cache_dtype: of keys and values, and so of queries.
    """

    def __init__(
        self, kind: WeightKind, *, width: int, outputs: int, attention_width: int, cache_dtype: torch.dtype
    ) -> None:
        self._num_words = words_per_row(kind, width)
        self._outputs, self._attention_width, self._cache_dtype = outputs, attention_width, cache_dtype
        self._capacity = 0
        self.reserve(16)

    def reserve(self, num_tokens: int) -> None:
        """Make room for a step of ``num_tokens``."""
        if num_tokens <= self._capacity:
            return
        self.words = huge_zeros((num_tokens * self._num_words,), torch.int32)
        self.row_scales = huge_zeros((num_tokens,), torch.float32)
        self.wide = huge_zeros((num_tokens * self._outputs,), torch.float32)
        self.query, self.attended = (
            huge_zeros((num_tokens * self._attention_width,), self._cache_dtype) for _ in range(2)
        )
        for memory in (self.words, self.row_scales, self.wide, self.query, self.attended):
            memory.zero_()  # memory is given when it is first written, and no step is to wait for it
        self._capacity = num_tokens


class CpuStep:
    """One step's batch for the kernels.

    Args:
        hidden: float32 [num_tokens, hidden_size], the residual stream, which the halves add to.
        positions: int64 [num_tokens].
        rope: float32 [length, 2, head_dim // 2].
        metadata: the step's attention.
        block_size: tokens in a KV block.
        scratch: with room for as many tokens.
        partial: like ``hidden``; where it is given, the halves write what is to be added there instead.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        scratch: Scratch,
        partial: torch.Tensor | None = None,
    ) -> None:
        scratch.reserve(hidden.shape[0])
        block_tables = metadata.block_tables
        assert hidden.is_contiguous()
        assert block_tables.is_contiguous()
        assert block_tables.dtype == metadata.cu_seqlens_q.dtype == metadata.seq_lens.dtype == torch.int32
        assert positions.dtype == metadata.slot_mapping.dtype == torch.int64
        # The structure holds addresses only: whatever they lead to must live as long.
        self._kept = (hidden, positions, rope, metadata, partial)
        self.c_step = CStep(
            hidden.data_ptr(),
            None if partial is None else partial.data_ptr(),
            rope.data_ptr(),
            positions.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            metadata.cu_seqlens_q.data_ptr(),
            metadata.seq_lens.data_ptr(),
            block_tables.data_ptr(),
            hidden.shape[0],
            len(metadata.seq_lens),
            block_tables.shape[1],
            block_size,
            scratch.words.data_ptr(),
            scratch.row_scales.data_ptr(),
            scratch.wide.data_ptr(),
            scratch.query.data_ptr(),
            scratch.attended.data_ptr(),
        )


def attention_half(layer: CLayer, step: CpuStep, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Add a layer's attention to the hidden states, storing the step's keys and values on the way.

    The caches are [num_blocks, block_size, num_kv_heads, head_dim].
    """
    require().pagoda_attention_half(
        ctypes.byref(layer),
        ctypes.byref(step.c_step),
        pointer(key_cache),
        pointer(value_cache),
    )


def mlp_half(layer: CLayer, step: CpuStep) -> None:
    """Add a layer's feed-forward to the hidden states."""
    require().pagoda_mlp_half(ctypes.byref(layer), ctypes.byref(step.c_step))


def all_layers(layers: list[CLayer], step: CpuStep, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compute both halves of every layer in one call; ``caches`` are each layer's keys and values.

    A call gives the interpreter's lock away and must wait for it at the end: with one a layer, an event loop beside it
    would hold a step up as often.
    """
    count = len(layers)
    addresses = ctypes.c_void_p * count
    require().pagoda_layers(
        addresses(*map(ctypes.addressof, layers)),
        ctypes.c_int32(count),
        ctypes.byref(step.c_step),
        addresses(*(keys.data_ptr() for keys, _ in caches)),
        addresses(*(values.data_ptr() for _, values in caches)),
    )


def logits(
    output: torch.Tensor, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: PackedLinear, scratch: Scratch
) -> None:
    """Write the float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size] to ``output``."""
    assert hidden.is_contiguous()
    assert hidden.dtype == torch.float32
    scratch.reserve(hidden.shape[0])
    require().pagoda_logits(
        pointer(output),
        pointer(hidden),
        ctypes.c_int32(hidden.shape[0]),
        pointer(norm),
        ctypes.c_float(eps),
        ctypes.byref(head.c_weight),
        pointer(scratch.words),
        pointer(scratch.row_scales),
    )

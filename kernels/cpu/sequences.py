"""CpuSequences: a step's sequences as the C kernels of recurrent layers read them (csrc/recurrent/sequences.h)."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import CSequences
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["CpuSequences"]


class CpuSequences:
    """One step's sequences for the kernels; the tensors of ``metadata`` are on the CPU."""

    def __init__(self, metadata: RecurrentMetadata) -> None:
        tensors = (
            metadata.cu_seqlens,
            metadata.slots,
            metadata.starts,
            metadata.save_tokens,
            metadata.save_slots,
        )
        assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)
        self._kept = tensors  # the structure holds addresses only
        self.c_sequences = CSequences(
            *(tensor.data_ptr() for tensor in tensors), metadata.num_seqs, metadata.save_tokens.shape[0]
        )

"""The attention backend of a CPU: the C kernel where it computes what is asked for, else torch's own operators."""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels.attention import c_kernel
from kernels.attention.base import AttentionBackend, AttentionInputs
from kernels.attention.sdpa import SdpaAttention
from kernels.attention.sparse import as_decodes, sparse_attention

__all__ = ["CpuBackend"]


class CpuBackend(AttentionBackend):
    """Paged attention without a GPU: float32, bfloat16 and float16, any block size. Used by one thread.

    With `use_c_kernel` False torch's operators compute everything.
    """

    name: ClassVar[str] = "cpu"
    default_block_size: ClassVar[int] = 16
    uses_cpu_kernels: ClassVar[bool] = True

    def __init__(self, *, use_c_kernel: bool = True) -> None:
        self._use_c_kernel = use_c_kernel
        self._sdpa = SdpaAttention()

    def check_block_size(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} holds no token; the cpu attention backend needs 1 or more")

    def forward(self, inputs: AttentionInputs) -> torch.Tensor:
        has_equal_dims = inputs.value_dim == inputs.head_dim or inputs.has_latents
        is_sparse, can_be_c = inputs.topk_slots is not None, self._use_c_kernel and inputs.sinks is None
        can_be_c = can_be_c and has_equal_dims
        if can_be_c and c_kernel.is_supported(inputs.key_cache.dtype, inputs.head_dim, inputs.value_dim):
            return c_kernel.paged_attention(as_decodes(inputs) if is_sparse else inputs)
        return sparse_attention(inputs) if is_sparse else self._sdpa.forward(inputs)

"""Sizes with which the kernels of prompts are timed, beside those that they have.

It needs Triton: import it where the operations are Triton's.
"""

from __future__ import annotations

import torch

from kernels.recurrent.triton.ops import TritonOps
from kernels.recurrent.triton.prompts import Tuning, delta_rule_of_prompts, row_decays_of_prompts, scan_of_prompts
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["EXACT", "TUNINGS", "TunedOps"]

EXACT = Tuning(chunk=32, num_stages=1)  # for float32, which is else computed token by token
TUNINGS = {  # whose kernels spill no registers on Hopper
    "delta rule": (Tuning(num_warps=4), Tuning(num_stages=3), Tuning(num_warps=4, num_stages=3, chunk_warps=8)),
    "row decays": (Tuning(chunk_warps=8), Tuning(chunk=32, chunk_warps=8)),
    "selective scan": (Tuning(block=64, num_stages=3), Tuning(num_stages=3), Tuning(num_stages=4)),
}


class TunedOps(TritonOps):
    """Operations that compute sequences of many tokens, in chunks of any dtype with given sizes; no others."""

    def __init__(self, tuning: Tuning) -> None:
        super().__init__()
        self.tuning = tuning

    def gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        output = value.new_empty(value.shape)
        of_prompts = delta_rule_of_prompts if decay.dim() == 2 else row_decays_of_prompts
        of_prompts(output, query, key, value, decay, beta, state, metadata, self.tuning)
        return output

    def selective_scan(
        self,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        decay: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        metadata: RecurrentMetadata,
    ) -> torch.Tensor:
        output = inputs.new_empty(inputs.shape)
        scan_of_prompts(output, inputs, steps, decay, keys, queries, skip, state, metadata, self.tuning)
        return output

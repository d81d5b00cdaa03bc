"""Launch the kernels of recurrent layers as models of several families do, for compile_for_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.recurrent.triton.ops import TritonOps
from kernels.recurrent_metadata import RecurrentMetadata

__all__ = ["RECURRENT_MODELS", "run_recurrent"]

Launch = Callable[[RecurrentMetadata, int, torch.dtype], None]


def _conv(channels: int, width: int, *, has_bias: bool, silu: bool) -> Launch:
    def launch(metadata: RecurrentMetadata, num_tokens: int, dtype: torch.dtype) -> None:
        inputs = torch.zeros(num_tokens, 2 * channels, dtype=dtype)[:, :channels]  # of a wider projection
        weight, bias = torch.zeros(channels, width, dtype=dtype), torch.zeros(channels, dtype=dtype)
        state = torch.zeros(1, width - 1, channels)
        TritonOps().causal_conv(inputs, weight, bias if has_bias else None, state, metadata, silu=silu)

    return launch


def _delta_rule(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int, *decayed: int) -> Launch:
    def launch(metadata: RecurrentMetadata, num_tokens: int, dtype: torch.dtype) -> None:
        keys = torch.zeros(num_tokens, num_key_heads, key_dim, dtype=dtype)
        values = torch.zeros(num_tokens, num_heads, value_dim, dtype=dtype)
        state, betas = torch.zeros(1, num_heads, key_dim, value_dim), torch.zeros(num_tokens, num_heads)
        decays = torch.zeros(num_tokens, num_heads, *decayed)
        TritonOps().gated_delta_rule(keys, keys, values, decays, betas, state, metadata)

    return launch


def _scan(num_groups: int, num_heads: int, head_dim: int, state_size: int) -> Launch:
    def launch(metadata: RecurrentMetadata, num_tokens: int, dtype: torch.dtype) -> None:
        inputs = torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype)
        keys = torch.zeros(num_tokens, num_groups, state_size, dtype=dtype)
        state, of_heads = torch.zeros(1, num_heads, head_dim, state_size), torch.zeros(num_heads)
        steps = torch.zeros(num_tokens, num_heads)
        TritonOps().selective_scan(inputs, steps, of_heads, keys, keys, of_heads, state, metadata)

    return launch


RECURRENT_MODELS: dict[str, tuple[Launch, ...]] = {
    "Qwen3.5-0.8B": (_conv(6144, 4, has_bias=False, silu=True), _delta_rule(16, 16, 128, 128)),
    "Qwen3-Next-80B-A3B": (_conv(8192, 4, has_bias=False, silu=True), _delta_rule(16, 32, 128, 128)),
    "a delta rule with odd heads": (_delta_rule(2, 6, 96, 80),),
    "Kimi-Linear-48B-A3B": (_conv(12288, 4, has_bias=False, silu=True), _delta_rule(32, 32, 128, 128, 128)),
    "LFM2-1.2B": (_conv(2048, 3, has_bias=False, silu=False),),
    "Granite-4.0-H-Small": (_conv(8448, 4, has_bias=True, silu=True), _scan(1, 128, 64, 128)),
    "Nemotron-3-Nano": (_conv(6144, 4, has_bias=True, silu=True), _scan(8, 64, 64, 128)),
    "Falcon-H1-34B": (_conv(4608, 4, has_bias=True, silu=True), _scan(2, 32, 128, 256)),
    "Mamba-2 with an odd size": (_conv(300, 4, has_bias=True, silu=True), _scan(1, 5, 52, 16)),
}


def run_recurrent(
    launches: tuple[Launch, ...],
    dtype: torch.dtype,
    steps: Sequence[Sequence[int]] = ((70,), (1,)),
    num_saves: int = 0,
) -> None:
    """Launch a model's kernels for steps, by default of a chunk and of a decode; a step is its sequences' lengths."""
    for lengths in steps:
        metadata = RecurrentMetadata(
            cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            slots=torch.zeros(len(lengths), dtype=torch.int32),
            starts=torch.ones(len(lengths), dtype=torch.int32),
            save_tokens=torch.arange(num_saves, dtype=torch.int32),
            save_slots=torch.zeros(num_saves, dtype=torch.int32),
            num_decodes=0,
        )
        for launch in launches:
            launch(metadata, sum(lengths), dtype)

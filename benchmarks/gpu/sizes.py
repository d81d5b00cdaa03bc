"""Sizes of a run of the check: a real model's shape on a GPU, a tiny one to test the script."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "TINY", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the workload."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    attention_context: int
    copy_bytes: int
    matmul_size: int


FULL = Sizes(  # Qwen3-0.6B's shape
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    batches=(1, 64, 256),
    prompt_tokens=256,
    output_tokens=128,
    attention_context=4096,
    copy_bytes=4 * 2**30,
    matmul_size=8192,
)
TINY = Sizes(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    batches=(1, 4),
    prompt_tokens=24,
    output_tokens=8,
    attention_context=64,
    copy_bytes=2**20,
    matmul_size=128,
)

"""Shard: the part of a checkpoint's tensor that one tensor-parallel rank holds. Knows names and sizes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig

__all__ = ["Shard", "shard_of", "vocab_range"]


@dataclass(frozen=True)
class Shard:
    """A range along one dimension of a tensor."""

    dim: int
    full: int  # the whole tensor's size along dim
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.stop - self.start == self.full


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """Return a rank's first token id and number of ids: the same on every rank, so the last may have padding."""
    num_ids = -(-vocab_size // size)
    return rank * num_ids, num_ids


def shard_of(name: str, config: ModelConfig, rank: int, size: int) -> Shard | None:
    """Return the part of the tensor ``name`` that a rank reads, or None if every rank reads the whole.

    If there are fewer KV heads than ranks, neighbouring ranks read the same head.
    """
    module, kind = name.split(".")[-2:]
    if module in ("embed_tokens", "lm_head"):
        start, num_ids = vocab_range(config.vocab_size, rank, size)
        return Shard(0, config.vocab_size, min(start, config.vocab_size), min(start + num_ids, config.vocab_size))
    own = config.shard(size)
    features = {
        "q_proj": (0, config.num_heads, own.num_heads, config.head_dim),
        "k_proj": (0, config.num_kv_heads, own.num_kv_heads, config.head_dim),
        "v_proj": (0, config.num_kv_heads, own.num_kv_heads, config.head_dim),
        "o_proj": (1, config.num_heads, own.num_heads, config.head_dim),
        "gate_proj": (0, config.intermediate_size, own.intermediate_size, 1),
        "up_proj": (0, config.intermediate_size, own.intermediate_size, 1),
        "down_proj": (1, config.intermediate_size, own.intermediate_size, 1),
    }
    if module not in features or (module in ("o_proj", "down_proj") and kind == "bias"):
        return None
    dim, full, count, width = features[module]
    start = rank * full // size
    return Shard(dim, full * width, start * width, (start + count) * width)

"""Shard: the part of a checkpoint's tensor that one tensor-parallel rank holds. Knows names and sizes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config.model_config import ModelConfig

__all__ = ["Shard", "layer_of", "shard_of", "vocab_range"]


@dataclass(frozen=True)
class Shard:
    """A range along one dimension of a matrix or vector, which may be one of several that a tensor stacks."""

    dim: int  # of the matrix
    full: int  # the whole matrix's size along dim
    start: int
    stop: int
    num_stacked: int | None = None  # matrices in the tensor, [num_stacked, rows, columns]; None: it is the matrix
    index: int = 0  # which of them

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.num_stacked is None and self.stop - self.start == self.full

    def stored_shape(self, own: list[int]) -> list[int]:
        """Return the shape of the whole tensor, given the shape ``own`` of a rank's part of a matrix."""
        matrix = [self.full if dim == self.dim else size for dim, size in enumerate(own)]
        return matrix if self.num_stacked is None else [self.num_stacked, *matrix]


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """Return a rank's first token id and number of ids: the same on every rank, so the last may have padding."""
    num_ids = -(-vocab_size // size)
    return rank * num_ids, num_ids


def layer_of(name: str) -> int:
    """Return the index of the layer that our parameter ``name`` belongs to; -1: to none."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else -1


def shard_of(name: str, config: ModelConfig, rank: int, size: int) -> Shard | None:
    """Return the part of the tensor ``name`` that a rank reads, or None if every rank reads the whole.

    If there are fewer KV heads than ranks, neighbouring ranks read the same head.
    """
    module, kind = name.split(".")[-2:]
    if module in ("embed_tokens", "embed_tokens_per_layer", "lm_head"):
        full = config.per_layer_vocab_size if module == "embed_tokens_per_layer" else config.vocab_size
        start, num_ids = vocab_range(full, rank, size)
        return Shard(0, full, min(start, full), min(start + num_ids, full))
    own, layer = config.shard(size), layer_of(name)
    inner, own_inner = config.intermediate_size_of(layer), own.intermediate_size_of(layer)
    heads, own_heads = config.kv_heads(layer), own.kv_heads(layer)
    if ".shared_expert." in name and config.experts is not None:
        inner = config.experts.shared_intermediate_size
        own_inner = inner // size
    latent = config.latent
    if latent is not None and module in ("q_a_proj", "kv_a_proj_with_mqa"):  # of a fused parameter, whole on every rank
        count = latent.cache.elements_per_token if module == "kv_a_proj_with_mqa" else latent.query_rank or 0
        return Shard(0, count, 0, count)
    nope_dim, value_dim = (0, heads.dim) if latent is None else (latent.nope_dim, latent.value_dim)
    features = {
        "q_proj": (0, config.num_heads, own.num_heads, heads.dim * (2 if config.gates_attention else 1)),
        "k_proj": (0, heads.count, own_heads.count, heads.dim),
        "v_proj": (0, heads.count, own_heads.count, heads.dim),
        "q_b_proj": (0, config.num_heads, own.num_heads, heads.dim),
        "kv_b_proj": (0, config.num_heads, own.num_heads, nope_dim + value_dim),
        "o_proj": (1, config.num_heads, own.num_heads, value_dim),
        "gate_proj": (0, inner, own_inner, 1),
        "up_proj": (0, inner, own_inner, 1),
        "down_proj": (1, inner, own_inner, 1),
    }
    if module not in features or (module in ("o_proj", "down_proj") and kind == "bias"):
        return None
    dim, full, count, width = features[module]
    start = rank * full // size
    return Shard(dim, full * width, start * width, (start + count) * width)

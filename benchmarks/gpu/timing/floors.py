"""The least time of a step: the bytes it must read and the operations it must do, at the machine's measured rates.

Counted are the weights of the linears, of experts those that random tokens choose, and, once a step, the keys and
values; arithmetic of linears and attention. Not counted are norms, rotary embedding, routers, activations and sampling.
Keys and values are bfloat16, and weights, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.limits.model_shape import WEIGHT_BYTES, ModelShape

__all__ = ["Limits", "Work", "decode_step", "prefill"]


@dataclass(frozen=True)
class Limits:
    """Rates of this machine, measured in the same run."""

    copy_gb_s: float  # bytes read and written
    bf16_tflop_s: float


@dataclass(frozen=True)
class Work:
    """What must be moved and computed."""

    num_bytes: float
    flop: float

    def floor_s(self, limits: Limits) -> float:
        """Return the least time, in seconds."""
        return max(self.num_bytes / (limits.copy_gb_s * 1e9), self.flop / (limits.bf16_tflop_s * 1e12))

    def figures(self, seconds: float, limits: Limits) -> dict[str, float]:
        """Return the time in milliseconds beside the floor, and the share of the limit that it reaches."""
        floor = self.floor_s(limits)
        return {"milliseconds": 1e3 * seconds, "floor_milliseconds": 1e3 * floor, "share_of_limit": floor / seconds}


def decode_step(
    shape: ModelShape,
    batch: int,
    context: float,
    weight_bytes: float = WEIGHT_BYTES,
    kv_cache_dtype: str = "auto",
) -> Work:
    """Return the work of one decode step of ``batch`` sequences with ``context`` tokens each.

    Args:
        weight_bytes: of one weight of the layers; the head's are bfloat16.
        kv_cache_dtype: the engine's option.
    """
    parameters = shape.layer_parameters + shape.head_parameters
    return Work(
        num_bytes=weight_bytes * shape.weights_read(batch)
        + WEIGHT_BYTES * shape.head_parameters
        + batch * context * _kv_bytes_per_token(shape, kv_cache_dtype),
        flop=2 * batch * parameters + batch * _attention_flop(shape, context),
    )


def prefill(shape: ModelShape, prompts: int, tokens: int, kv_cache_dtype: str = "auto") -> Work:
    """Return the work of computing prompts of ``tokens`` tokens and the logits of the last one of each."""
    linears = tokens * shape.layer_parameters + shape.head_parameters
    return Work(
        num_bytes=WEIGHT_BYTES * (shape.weights_read(prompts * tokens) + shape.head_parameters)
        + prompts * tokens * _kv_bytes_per_token(shape, kv_cache_dtype),
        flop=prompts * (2 * linears + _attention_flop(shape, tokens * (tokens + 1) / 2)),
    )


def _kv_bytes_per_token(shape: ModelShape, kv_cache_dtype: str) -> float:
    return shape.kv_bytes_per_token / (1 if kv_cache_dtype == "auto" else WEIGHT_BYTES)


def _attention_flop(shape: ModelShape, pairs: float) -> float:
    """Return the operations of Q K^T and of the product with V for ``pairs`` of query and key, in all layers."""
    return 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers

"""The activation of gated experts in Triton."""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gated_product"]

_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def gated_product(gate, up, IS_GELU: tl.constexpr):
    """Return the activated gate * up; the activation is GELU with the approximation by tanh, or SiLU."""
    # Both activations are x times a sigmoid: tanh(z) is 2 sigmoid(2z) - 1.
    argument = _SQRT_8_OVER_PI * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    small = tl.exp(-tl.abs(argument))  # at most 1
    return gate * (tl.where(argument >= 0.0, 1.0, small) / (1.0 + small)) * up

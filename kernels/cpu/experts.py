"""PackedExperts: the experts of one layer as the C kernels read them (csrc/experts/experts.h), and their product."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.cpu.bindings import CExperts, CWeight
from kernels.cpu.library import require
from kernels.cpu.linear import LANES, PANELS_AT_ONCE, PackedLinear, WeightKind

__all__ = ["ExpertSizes", "PackedExperts", "experts"]


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The sizes of one layer's experts, or of a tensor-parallel rank's share of every expert."""

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int  # 0: no expert computes every token
    normalizes_weights: bool


class PackedExperts:
    """One layer's packed experts, zero until they are set. The router's weights stay float32, whatever the kind is.

    Args:
        sizes: of the layer.
        kind: the type of the experts' packed weights.
    """

    def __init__(self, sizes: ExpertSizes, kind: WeightKind) -> None:
        self.sizes = sizes
        count, hidden = sizes.num_experts, sizes.hidden_size
        self._inner = _padded(sizes.intermediate_size, LANES * PANELS_AT_ONCE // 2)
        self._hidden = _padded(hidden, LANES * PANELS_AT_ONCE)
        shared = _padded(sizes.shared_intermediate_size, LANES)
        self.router = PackedLinear(WeightKind.FLOAT32, hidden, count + (shared > 0))
        self.gate_up = PackedLinear(kind, hidden, count * 2 * self._inner)
        self.down = PackedLinear(kind, self._inner, count * self._hidden)
        self.shared_gate_up = PackedLinear(kind, hidden, 2 * shared) if shared else None
        self.shared_down = PackedLinear(kind, shared, hidden) if shared else None
        self.c_experts = CExperts(
            self.router.c_weight,
            self.gate_up.c_weight,
            self.down.c_weight,
            CWeight() if self.shared_gate_up is None else self.shared_gate_up.c_weight,
            CWeight() if self.shared_down is None else self.shared_down.c_weight,
            num_experts=count,
            top_k=sizes.top_k,
            hidden_size=hidden,
            intermediate_size=self._inner,
            normalizes_weights=sizes.normalizes_weights,
        )

    @property
    def address(self) -> int:
        """Where the C structure is, which this object must outlive."""
        return ctypes.addressof(self.c_experts)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        linears = (self.router, self.gate_up, self.down, self.shared_gate_up, self.shared_down)
        return sum(linear.num_bytes for linear in linears if linear is not None)

    def set_router_weight(self, weight: torch.Tensor) -> None:
        """Set the router's weights, [num_experts, hidden_size]."""
        self.router.set_weight(weight)

    def set_shared_gate_weight(self, weight: torch.Tensor) -> None:
        """Set the weights of the shared expert's gate, [1, hidden_size]."""
        self.router.set_weight(weight, first_output=self.sizes.num_experts)

    def set_gate_up_weight(self, expert: int, weight: torch.Tensor) -> None:
        """Set one expert's gate and up, one below the other: [2 * intermediate_size, hidden_size]."""
        for offset, half in enumerate(weight.chunk(2)):
            self.gate_up.set_weight(half, first_output=expert * self._inner, every=2, offset=offset)

    def set_down_weight(self, expert: int, weight: torch.Tensor) -> None:
        """Set one expert's down, [hidden_size, intermediate_size]."""
        self.down.set_weight(weight, first_output=expert * self._hidden)

    def set_shared_gate_up_weight(self, weight: torch.Tensor) -> None:
        """Set the shared expert's gate and up, one below the other: [2 * shared_intermediate_size, hidden_size]."""
        assert self.shared_gate_up is not None
        for offset, half in enumerate(weight.chunk(2)):
            self.shared_gate_up.set_weight(half, every=2, offset=offset)

    def set_shared_down_weight(self, weight: torch.Tensor) -> None:
        """Set the shared expert's down, [hidden_size, shared_intermediate_size]."""
        assert self.shared_down is not None
        self.shared_down.set_weight(weight)


def experts(hidden: torch.Tensor, packed: PackedExperts, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """Return experts(norm(hidden)), float32; both are [num_tokens, hidden_size].

    Args:
        hidden: float32, contiguous.
        packed: the layer's experts.
        norm: float32 [hidden_size], the weights of the RMSNorm before them.
        eps: what that adds to the mean square.
    """
    assert hidden.is_contiguous()
    assert hidden.dtype == norm.dtype == torch.float32
    output = torch.empty_like(hidden)
    require().pagoda_compute_experts(
        packed.c_experts, output.data_ptr(), hidden.data_ptr(), len(hidden), norm.data_ptr(), eps, False
    )
    return output


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

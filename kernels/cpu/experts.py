"""PackedExperts: the experts of one layer as the C kernels read them (csrc/experts/experts.h), and their product."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.coded_weight import Weight, halves
from kernels.cpu.bindings import CExperts, CWeight
from kernels.cpu.coded_linear import NOT_CODED, Coded, packed_linear
from kernels.cpu.library import require
from kernels.cpu.linear import LANES, PANELS_AT_ONCE, PackedLinear, WeightKind, activation_number
from kernels.layer_ops.base import Activation

__all__ = ["ExpertSizes", "PackedExperts", "experts"]


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The sizes of one layer's experts, or of a tensor-parallel rank's share of every expert.

    Attributes:
        shared_intermediate_size: of the expert that computes every token; 0: there is none.
        normalizes_weights: the chosen experts' scores are divided by their sum and ``norm_epsilon``.
        is_sigmoid: scores are sigmoids of the router's logits; else their softmax.
        weight_scale: of the chosen experts' weights.
        has_gate: an expert is gated; else it squares what a ReLU leaves, whatever ``activation`` says.
        activation: of the gate.
        gates_shared_expert: the sigmoid of a logit multiplies the shared expert.
        latent_size: features that routed experts read and write, by projections around all of them; None: no such.
        num_groups: of equally many experts, of which a token first chooses ``top_groups``.
        groups_sum_two: a group is chosen by the sum of its experts' two best scores; else by the best one.
        scales_inputs: the chosen experts' weights multiply what they read, and not what they return.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    normalizes_weights: bool
    norm_epsilon: float = 0.0
    is_sigmoid: bool = False
    weight_scale: float = 1.0
    has_gate: bool = True
    activation: Activation = "silu"
    gates_shared_expert: bool = True
    latent_size: int | None = None
    num_groups: int = 1
    top_groups: int = 1
    groups_sum_two: bool = False
    scales_inputs: bool = False

    @property
    def width(self) -> int:
        """Features that a routed expert reads and writes."""
        return self.latent_size or self.hidden_size


class PackedExperts:
    """One layer's packed experts, zero until they are set. The router's weights stay float32, whatever the kind is.

    Args:
        sizes: of the layer.
        kind: the type of the experts' packed weights.
        coded: the formats of weights that stay codes, by the names of the attributes; the others are of this kind.
    """

    def __init__(self, sizes: ExpertSizes, kind: WeightKind, coded: Coded = NOT_CODED) -> None:
        self.sizes = sizes
        count, hidden = sizes.num_experts, sizes.hidden_size
        halves = 2 if sizes.has_gate else 1
        self._inner = _padded(sizes.intermediate_size, LANES * PANELS_AT_ONCE // halves)
        self._outputs = _padded(sizes.width, LANES * PANELS_AT_ONCE)
        shared = _padded(sizes.shared_intermediate_size, LANES)
        gates_shared = shared > 0 and sizes.gates_shared_expert
        self.router = PackedLinear(WeightKind.FLOAT32, hidden, count + gates_shared)
        self.gate_up = packed_linear(kind, sizes.width, count * halves * self._inner, sections=coded.get("gate_up"))
        self.down = packed_linear(kind, self._inner, count * self._outputs, sections=coded.get("down"))
        self.shared_gate_up = (
            packed_linear(kind, hidden, halves * shared, sections=coded.get("shared_gate_up")) if shared else None
        )
        self.shared_down = packed_linear(kind, shared, hidden, sections=coded.get("shared_down")) if shared else None
        self.latent_in = (
            packed_linear(kind, hidden, sizes.width, sections=coded.get("latent_in")) if sizes.latent_size else None
        )
        self.latent_out = (
            packed_linear(kind, sizes.width, hidden, sections=coded.get("latent_out")) if sizes.latent_size else None
        )
        self.c_experts = CExperts(
            *(CWeight() if linear is None else linear.c_weight for linear in self._linears),
            num_experts=count,
            top_k=sizes.top_k,
            hidden_size=hidden,
            intermediate_size=self._inner,
            normalizes_weights=sizes.normalizes_weights,
            is_sigmoid=sizes.is_sigmoid,
            activation=activation_number(sizes.activation, has_gate=sizes.has_gate),
            num_groups=sizes.num_groups,
            top_groups=sizes.top_groups,
            groups_sum_two=sizes.groups_sum_two,
            gates_shared=gates_shared,
            scales_inputs=sizes.scales_inputs,
            epsilon=sizes.norm_epsilon,
            weight_scale=sizes.weight_scale,
        )

    @property
    def _linears(self) -> tuple[PackedLinear | None, ...]:
        """The linear layers in the order of the C structure."""
        shared = (self.shared_gate_up, self.shared_down)
        return (self.router, self.gate_up, self.down, *shared, self.latent_in, self.latent_out)

    @property
    def address(self) -> int:
        """Where the C structure is, which this object must outlive."""
        return ctypes.addressof(self.c_experts)

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return sum(linear.num_bytes for linear in self._linears if linear is not None)

    def set_router_weight(self, weight: torch.Tensor) -> None:
        """Set the router's weights, [num_experts, hidden_size]."""
        self.router.set_weight(weight)

    def set_shared_gate_weight(self, weight: torch.Tensor) -> None:
        """Set the weights of the shared expert's gate, [1, hidden_size]."""
        self.router.set_weight(weight, first_output=self.sizes.num_experts)

    def set_router_norm(self, weight: torch.Tensor) -> None:
        """Set the weights of an RMSNorm of the router's own input, [hidden_size]; without it, experts' norm is used."""
        self._router_norm = weight.float().contiguous()  # the structure has its address only
        self.c_experts.router_norm = self._router_norm.data_ptr()

    def set_expert_scales(self, scales: torch.Tensor) -> None:
        """Set factors of the chosen experts' weights, [num_experts]."""
        self._expert_scales = scales.float().contiguous()  # the structure has its address only
        self.c_experts.expert_scales = self._expert_scales.data_ptr()

    def set_choice_bias(self, bias: torch.Tensor) -> None:
        """Set what is added to the scores for the choice of experts, and not to their weights, [num_experts]."""
        self._choice_bias = bias.float().contiguous()  # the structure has its address only
        self.c_experts.choice_bias = self._choice_bias.data_ptr()

    def set_up_weight(self, expert: int, weight: Weight) -> None:
        """Set the first weights of an expert without a gate, [intermediate_size, width]."""
        assert not self.sizes.has_gate
        self.gate_up.set_weight(weight, first_output=expert * self._inner)

    def set_shared_up_weight(self, weight: Weight) -> None:
        """Set the first weights of a shared expert without a gate, [shared_intermediate_size, hidden_size]."""
        assert self.shared_gate_up is not None
        assert not self.sizes.has_gate
        self.shared_gate_up.set_weight(weight)

    def set_gate_up_weight(self, expert: int, weight: Weight) -> None:
        """Set one expert's gate and up, one below the other: [2 * intermediate_size, width]."""
        for offset, half in enumerate(halves(weight)):
            self.gate_up.set_weight(half, first_output=expert * self._inner, every=2, offset=offset)

    def set_down_weight(self, expert: int, weight: Weight) -> None:
        """Set one expert's down, [width, intermediate_size]."""
        self.down.set_weight(weight, first_output=expert * self._outputs)

    def set_shared_gate_up_weight(self, weight: Weight) -> None:
        """Set the shared expert's gate and up, one below the other: [2 * shared_intermediate_size, hidden_size]."""
        assert self.shared_gate_up is not None
        for offset, half in enumerate(halves(weight)):
            self.shared_gate_up.set_weight(half, every=2, offset=offset)

    def set_shared_down_weight(self, weight: Weight) -> None:
        """Set the shared expert's down, [hidden_size, shared_intermediate_size]."""
        assert self.shared_down is not None
        self.shared_down.set_weight(weight)

    def set_latent_in_weight(self, weight: Weight) -> None:
        """Set the weights of the projection before all routed experts, [latent_size, hidden_size]."""
        assert self.latent_in is not None
        self.latent_in.set_weight(weight)

    def set_latent_out_weight(self, weight: Weight) -> None:
        """Set the weights of the projection after all routed experts, [hidden_size, latent_size]."""
        assert self.latent_out is not None
        self.latent_out.set_weight(weight)


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
        packed.c_experts, output.data_ptr(), hidden.data_ptr(), len(hidden), norm.data_ptr(), eps, 1.0, False
    )
    return output


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""PackedRecurrent: the weights of one recurrent layer as the C kernels read them (csrc/recurrent/recurrent_layer.h)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from kernels.cpu.bindings import CRecurrentLayer, CWeight
from kernels.cpu.coded_linear import NOT_CODED, Coded, packed_linear
from kernels.cpu.linear import PackedLinear, WeightKind

__all__ = ["PackedRecurrent", "RecurrentKind", "RecurrentSizes"]

TensorName = Literal["conv_weight", "conv_bias", "step_bias", "decay", "skip", "norm"]


class RecurrentKind(IntEnum):
    """What a recurrent layer computes, as in csrc/recurrent/recurrent_layer.h."""

    SHORT_CONV = 0
    GATED_DELTA = 1
    MAMBA = 2
    KIMI_DELTA = 3


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes:
    """The sizes of a recurrent layer, or of a tensor-parallel rank's share.

    Attributes:
        num_heads: of values; 1 of a short convolution.
        num_groups: heads of queries and keys of delta rules, groups of them of Mamba.
        head_dim: elements of a head of values; of a short convolution its channels.
        state_size: elements of a query or key.
        conv_width: tokens that the convolution sees, the token itself included.
        norm_group: elements that the norm of the output divides by their root mean square.
        gates_first: whether the gate is multiplied before the norm.
        has_sigmoid: whether the gate is activated by a sigmoid, and not by SiLU.
        step_limits: the smallest and the largest step of Mamba.
        largest_beta: of delta rules.
    """

    kind: RecurrentKind
    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int
    num_groups: int = 0
    state_size: int = 0
    norm_group: int = 1
    gates_first: bool = False
    has_sigmoid: bool = False
    norm_eps: float = 0.0
    step_limits: tuple[float, float] = (0.0, math.inf)
    largest_beta: float = 1.0
    in_bias: bool = False
    out_bias: bool = False

    @property
    def inner_size(self) -> int:
        """Features that the output projection reads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def input_width(self) -> int:
        """Outputs of the input projection."""
        match self.kind:
            case RecurrentKind.SHORT_CONV:
                return 3 * self.inner_size
            case RecurrentKind.GATED_DELTA:
                return self.channels + self.inner_size + 2 * self.num_heads
            case RecurrentKind.KIMI_DELTA:
                return self.channels + self.num_heads + 2 * self.head_dim
        return self.inner_size + self.channels + self.num_heads

    @property
    def row_width(self) -> int:
        """Numbers of a token that are computed before the rule, the outputs of the input projection first."""
        has_steps_and_gates = self.kind is RecurrentKind.KIMI_DELTA
        return self.input_width + (2 * self.inner_size if has_steps_and_gates else 0)


class PackedRecurrent:
    """One recurrent layer's weights, zero until they are set; biases of convolutions and norms are optional.

    Args:
        sizes: of the layer.
        kind: the type of the projections' packed weights.
        coded: the formats of weights that stay codes, by the names of the attributes; the others are of this kind.

    Attributes:
        input: its outputs are, of a short convolution, the gates before and after it and its inputs; of the gated delta
            rule queries, keys, values, the norm's gate, and beta and step of each head; of Mamba the gate, inputs,
            keys, queries, and the step of each head; of Kimi delta attention queries, keys, values, beta of each head,
            and what steps and what gates are computed of.
        output: the last projection.
        steps, gates: the projections to them, of Kimi delta attention.
    """

    def __init__(self, sizes: RecurrentSizes, kind: WeightKind, coded: Coded = NOT_CODED) -> None:
        self.sizes = sizes
        self.input = packed_linear(
            kind, sizes.hidden_size, sizes.input_width, has_bias=sizes.in_bias, sections=coded.get("input")
        )
        self.output = packed_linear(
            kind, sizes.inner_size, sizes.hidden_size, has_bias=sizes.out_bias, sections=coded.get("output")
        )
        self.steps, self.gates = None, None
        if sizes.kind is RecurrentKind.KIMI_DELTA:
            self.steps, self.gates = (PackedLinear(kind, sizes.head_dim, sizes.inner_size) for _ in range(2))
        self._tensors: dict[TensorName, torch.Tensor] = {}
        smallest_step, largest_step = sizes.step_limits
        self.c_layer = CRecurrentLayer(
            self.input.c_weight,
            self.output.c_weight,
            *(CWeight() if linear is None else linear.c_weight for linear in (self.steps, self.gates)),
            kind=sizes.kind,
            conv_width=sizes.conv_width,
            num_heads=sizes.num_heads,
            num_groups=sizes.num_groups,
            head_dim=sizes.head_dim,
            state_size=sizes.state_size,
            norm_group=sizes.norm_group,
            gates_first=sizes.gates_first,
            has_sigmoid=sizes.has_sigmoid,
            eps=sizes.norm_eps,
            smallest_step=smallest_step,
            largest_step=largest_step,
            largest_beta=sizes.largest_beta,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that the projections' weights take."""
        linears = (self.input, self.output, self.steps, self.gates)
        return sum(linear.num_bytes for linear in linears if linear is not None)

    @property
    def address(self) -> int:
        """Where the structure is, for the layer's structure."""
        return ctypes.addressof(self.c_layer)

    def set_conv_weight(self, weight: torch.Tensor) -> None:
        """Set the weights of the convolution, [channels, 1, width]; the last one is the token's own."""
        self._set("conv_weight", weight.squeeze(1).t())

    def set_conv_bias(self, bias: torch.Tensor) -> None:
        """Set the biases of the convolution, [channels]."""
        self._set("conv_bias", bias)

    def set_step_bias(self, bias: torch.Tensor) -> None:
        """Set what is added to the steps before their softplus, [num_heads], or [num_heads * head_dim]."""
        self._set("step_bias", bias)

    def set_decay(self, logarithms: torch.Tensor) -> None:
        """Set the logarithms of the decays, one of each head: a step is multiplied by -e^logarithm."""
        self._set("decay", -logarithms.float().exp())

    def set_skip(self, skip: torch.Tensor) -> None:
        """Set Mamba's D, [num_heads]."""
        self._set("skip", skip)

    def set_norm(self, weight: torch.Tensor) -> None:
        """Set the weights of the output's norm, [num_heads * head_dim], or [head_dim] of every head alike."""
        self._set("norm", weight.repeat(self.sizes.inner_size // len(weight)))

    def _set(self, name: TensorName, values: torch.Tensor) -> None:
        self._tensors[name] = values.float().contiguous()  # the structure has its address only
        setattr(self.c_layer, name, self._tensors[name].data_ptr())

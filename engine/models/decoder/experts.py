"""SparseMoeBlock: a mixture of experts as a layer's feed-forward, computed by torch's operators or in Triton.

Tensor-parallel ranks hold a part of the features of every expert, so all route alike, and one sum joins their outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.models.config.shapes.experts import ExpertsShape
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import CodedWeight
from kernels.experts.coded_stack import CodedStack
from kernels.experts.experts import routed_experts
from kernels.experts.route import Groups, Scores

__all__ = ["Experts", "SparseMoeBlock"]


class Experts(nn.Module):
    """The stacked weights of a layer's experts, which the loader sets one expert at a time.

    Weights that stay codes are a `CodedStack` in the place of the parameter.
    """

    gate_up_proj: nn.Parameter | CodedStack  # of experts with a gate
    up_proj: nn.Parameter | CodedStack  # of others
    down_proj: nn.Parameter | CodedStack

    def __init__(self, shape: ExpertsShape, hidden_size: int) -> None:
        super().__init__()
        count, inner = shape.num_experts, shape.intermediate_size
        self.has_gate = shape.has_gate
        first = nn.Parameter(
            torch.empty(count, 2 * inner if self.has_gate else inner, hidden_size), requires_grad=False
        )
        self.register_parameter("gate_up_proj" if self.has_gate else "up_proj", first)
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, inner), requires_grad=False)

    @property
    def first(self) -> torch.Tensor | CodedStack:
        """The matrices that read an expert's input, [num_experts, rows, hidden_size]."""
        return self.gate_up_proj if self.has_gate else self.up_proj

    @property
    def has_codes(self) -> bool:
        """Whether weights are kept as codes."""
        return any(isinstance(module, CodedStack) for module in self.children())

    def set_weight(self, expert: int, name: str, weight: torch.Tensor) -> None:
        """Copy one expert's matrix ``name``, whose dtype and device all the layer's matrices take."""
        stack: nn.Parameter = getattr(self, name)
        if stack.is_meta:
            stack = nn.Parameter(torch.empty(stack.shape, dtype=weight.dtype, device=weight.device), False)
            setattr(self, name, stack)
        stack[expert] = weight

    def set_codes(
        self, expert: int, name: str, weight: CodedWeight, device: torch.device, *, batch_invariant: bool
    ) -> None:
        """Pack the codes of one expert's matrix ``name`` on a device; all of a layer's have the same format."""
        stack: nn.Parameter | CodedStack = getattr(self, name)
        num_experts, num_outputs = (
            (stack.num_experts, stack.out_features) if isinstance(stack, CodedStack) else stack.shape[:2]
        )
        section = CodedStack.section(weight, num_outputs, device)
        if not isinstance(stack, CodedStack):
            stack = CodedStack(section, num_experts, batch_invariant=batch_invariant)
            delattr(self, name)  # the parameter
            setattr(self, name, stack)
        stack.set_expert(expert, section)


class SparseMoeBlock(nn.Module):
    """A router, its experts and, if there is one, the shared expert that computes every token.

    Args:
        shape: of a rank's share.
        hidden_size: of the residual stream.
        parallel: the rank and its group.
        shared_expert: a dense feed-forward, of the rank's share, that does not sum over the ranks.
    """

    def __init__(
        self, shape: ExpertsShape, hidden_size: int, parallel: TensorParallel, shared_expert: nn.Module | None
    ) -> None:
        super().__init__()
        self.shape, self.hidden_size, self.parallel = shape, hidden_size, parallel
        inputs = shape.latent_size or hidden_size
        self.gate = nn.Linear(hidden_size, shape.num_experts, bias=False)
        self.expert_scale = nn.Parameter(torch.empty(shape.num_experts)) if shape.has_expert_scales else None  # float32
        self.expert_bias = nn.Parameter(torch.empty(shape.num_experts)) if shape.has_choice_bias else None  # float32
        self.experts = Experts(shape, inputs)
        self.fc1_latent_proj = nn.Linear(hidden_size, inputs, bias=False) if shape.latent_size else None
        self.fc2_latent_proj = nn.Linear(inputs, hidden_size, bias=False) if shape.latent_size else None
        self.shared_expert = shared_expert
        has_gate = shared_expert is not None and shape.gates_shared_expert
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if has_gate else None

    def forward(self, hidden: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """Map [num_tokens, hidden_size] to the same shape.

        Args:
            hidden: what the experts read.
            router_input: what the router reads; None: the same.
        """
        output = self._routed(hidden, hidden if router_input is None else router_input)
        if self.shared_expert is not None:
            shared = self.shared_expert(hidden)
            if self.shared_expert_gate is not None:
                shared = torch.sigmoid(self.shared_expert_gate(hidden)) * shared
            output = output + shared
        return self.parallel.all_reduce(output)

    def compile_kernels(self, dtype: torch.dtype, device: torch.device) -> None:
        """Launch what any number of tokens launches if weights stay codes, whose tiles suit the number of tokens."""
        if not self.experts.has_codes:
            return
        from kernels.experts.triton.coded_experts import most_rows_of_tiles  # a CPU needs no Triton

        shape = self.shape
        for num_rows in (0, *most_rows_of_tiles(dtype)):
            num_tokens = num_rows * shape.num_experts // shape.experts_per_token + 1
            hidden = torch.zeros(num_tokens, self.hidden_size, dtype=dtype, device=device)
            self._routed(hidden, hidden)

    def _routed(self, hidden: torch.Tensor, router_input: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts."""
        shape = self.shape
        logits = self.gate(router_input.float() if shape.float32_router else router_input)
        inputs = hidden if self.fc1_latent_proj is None else self.fc1_latent_proj(hidden)
        routed = routed_experts(
            inputs,
            logits,
            self.experts.first,
            self.experts.down_proj,
            shape.experts_per_token,
            normalize=shape.normalizes_weights,
            scores=self._scores(),
            gated=shape.has_gate,
            activation=shape.activation,
            expert_scale=self.expert_scale,
            scales_inputs=shape.scales_inputs,
        )
        return routed if self.fc2_latent_proj is None else self.fc2_latent_proj(routed)

    def _scores(self) -> Scores | None:
        """Return what becomes of the router's logits; None: a plain softmax."""
        shape, groups = self.shape, self.shape.groups
        if shape.scores == "softmax" and groups is None and shape.weight_scale == 1.0:
            return None
        return Scores(
            is_sigmoid=shape.scores == "sigmoid",
            bias=self.expert_bias,
            epsilon=shape.norm_epsilon,
            scale=shape.weight_scale,
            groups=None if groups is None else Groups(groups.count, groups.chosen, groups.score == "two_best"),
        )

"""PackedLayer: the weights of one decoder layer as the C kernels read them (csrc/layer/layer.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.attention.window import Window, sliding_and_chunk
from kernels.coded_weight import Weight, halves
from kernels.cpu.altup import PackedAltUp
from kernels.cpu.bindings import CLayer, CWeight
from kernels.cpu.coded_linear import NOT_CODED, Coded, packed_linear
from kernels.cpu.experts import PackedExperts
from kernels.cpu.latent import LatentSizes, PackedLatent
from kernels.cpu.linear import LANES, PackedLinear, WeightKind, activation_number
from kernels.cpu.recurrent_layer import PackedRecurrent
from kernels.layer_ops.base import Activation

__all__ = ["LayerShape", "NormName", "PackedLayer"]

NormName = Literal[
    "input_norm",
    "post_attention_norm",
    "attention_output_norm",
    "mlp_output_norm",
    "experts_norm",
    "dense_output_norm",
    "experts_output_norm",
    "own_output_norm",
    "laurel_norm",
    "query_norm",
    "key_norm",
]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of one decoder layer: attention with grouped queries, then a feed-forward.

    Attributes:
        num_heads: of queries; 0: the layer has no attention.
        intermediate_size: of the dense feed-forward; 0: the layer has none, or has experts alone.
        gates_attention: sigmoids of a gate, a projection of the layer's input, multiply attention's output.
        has_mlp_gate: the feed-forward is gated; else it squares what a ReLU leaves, whatever ``activation`` says.
        scale: of attention's scores; None: head_dim ** -0.5.
        softcap: C of C * tanh(score / C), which replaces each score of the attention.
        stores: the layer has keys and values of its own; else it reads those that another one caches.
        norms_values: values are divided by the root mean square of their head.
        norms_all_heads: the norms of queries and keys are over all heads of a token together.
        residual_multiplier: of what each half adds to the hidden states.
        latent: latent attention; then there is one KV head, of as many elements as the cache keeps of a token.
        own_width: of an input that the layer has beside the hidden states; 0: there is none.
        own_index: of this input among those of a step.
        laurel_rank: width of a low-rank branch beside attention; 0: there is none.
        mixer_inputs: numbers that ``qkv`` reads of each token; 0: as many as the hidden states have.
        gate_cutoff: of the feed-forward's gates, in standard deviations above a token's mean; None: all count.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    window: Window | None  # None: queries see all keys
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    scale: float | None = None
    softcap: float | None = None
    stores: bool = True
    norms_values: bool = False
    norms_all_heads: bool = False
    activation: Activation = "silu"
    residual_multiplier: float = 1.0
    gates_attention: bool = False
    has_mlp_gate: bool = True
    latent: LatentSizes | None = None
    own_width: int = 0
    own_index: int = 0
    laurel_rank: int = 0
    mixer_inputs: int = 0
    gate_cutoff: float | None = None


class PackedLayer:
    """One layer's packed weights, zero until they are set.

    Args:
        shape: of the layer, or of a tensor-parallel rank's share.
        kind: the type of the packed weights.
        cache_dtype: of the KV cache, float32 or bfloat16.
        coded: the formats of weights that stay codes, by the names of the attributes; the others are of this kind.

    Attributes:
        qkv, output, down: linear layers; the first outputs of ``qkv`` are the gate of attention's output, if any.
        gate_up: the feed-forward's two input layers; panels of 16 outputs alternate between gate and up. Without a gate
            there is only up.
        intermediate_size: features between gate_up and down, padded with zeros to whole panels.
        stores: whether the layer writes the keys and values that it reads.
        window: of the layer's queries.
        latent: what is between ``qkv`` and ``output`` in latent attention.
        experts: which replace gate_up and down if they are set, or are beside them if ``intermediate_size`` is not 0.
        own_gate, own_projection: linear layers of the layer's own input; None: it has none.
        laurel_left, laurel_right: linear layers of the branch beside attention; None: it has none.
        altup: of a layer with several residual streams.
        recurrent: which replaces attention, or is computed beside it if there are heads.
    """

    def __init__(self, shape: LayerShape, kind: WeightKind, cache_dtype: torch.dtype, coded: Coded = NOT_CODED) -> None:
        heads, kv_heads, head_dim, hidden = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size
        self.intermediate_size = -(-shape.intermediate_size // LANES) * LANES
        gate_width, halves = heads * head_dim if shape.gates_attention else 0, 2 if shape.has_mlp_gate else 1
        self.stores, self.window, self._has_mlp_gate = shape.stores, shape.window, shape.has_mlp_gate
        num_qkv = gate_width + (heads + 2 * kv_heads * shape.stores) * head_dim
        self.latent: PackedLatent | None = None
        value_dim = head_dim
        if shape.latent is not None:
            self.latent = PackedLatent(shape.latent, kind, coded)
            num_qkv, value_dim = shape.latent.query_width + head_dim, shape.latent.value_dim
        self.qkv = packed_linear(
            kind, shape.mixer_inputs or hidden, num_qkv, has_bias=shape.qkv_bias, sections=coded.get("qkv")
        )
        self.output = packed_linear(
            kind, heads * value_dim, hidden, has_bias=shape.output_bias, sections=coded.get("output")
        )
        self.gate_up = packed_linear(
            kind, hidden, halves * self.intermediate_size, has_bias=shape.mlp_bias, sections=coded.get("gate_up")
        )
        self.down = packed_linear(
            kind, self.intermediate_size, hidden, has_bias=shape.mlp_bias, sections=coded.get("down")
        )
        self.own_gate = (
            packed_linear(kind, hidden, shape.own_width, sections=coded.get("own_gate")) if shape.own_width else None
        )
        self.own_projection = (
            packed_linear(kind, shape.own_width, hidden, sections=coded.get("own_projection"))
            if shape.own_width
            else None
        )
        rank = shape.laurel_rank
        self.laurel_left = PackedLinear(kind, hidden, rank) if rank else None
        self.laurel_right = PackedLinear(kind, rank, hidden) if rank else None
        self.experts: PackedExperts | None = None
        self.recurrent: PackedRecurrent | None = None
        self.altup: PackedAltUp | None = None
        self._norms: dict[NormName, torch.Tensor] = {}
        sliding_window, chunk = sliding_and_chunk(shape.window)
        self.c_layer = CLayer(
            self.qkv.c_weight,
            self.output.c_weight,
            self.gate_up.c_weight,
            self.down.c_weight,
            CWeight() if self.own_gate is None else self.own_gate.c_weight,
            CWeight() if self.own_projection is None else self.own_projection.c_weight,
            CWeight() if self.laurel_left is None else self.laurel_left.c_weight,
            CWeight() if self.laurel_right is None else self.laurel_right.c_weight,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            gate_width=gate_width,
            hidden_size=hidden,
            intermediate_size=self.intermediate_size,
            sliding_window=sliding_window,
            chunk=chunk,
            is_bf16=cache_dtype == torch.bfloat16,
            norms_all_heads=shape.norms_all_heads,
            norms_values=shape.norms_values,
            activation=activation_number(shape.activation, has_gate=shape.has_mlp_gate),
            eps=shape.norm_eps,
            scale=(head_dim or 1) ** -0.5 if shape.scale is None else shape.scale,
            softcap=shape.softcap or 0.0,
            residual_multiplier=shape.residual_multiplier,
            num_gates=0 if shape.gate_cutoff is None else shape.intermediate_size,
            gate_cutoff=shape.gate_cutoff or 0.0,
            attention_output_scale=2.0**-0.5 if rank else 1.0,  # of a sum of two branches
            own_width=shape.own_width,
            own_index=shape.own_index,
            output_scale=1.0,
            latent=None if self.latent is None else self.latent.address,
            own_output_scale=1.0,
        )

    @property
    def has_attention(self) -> bool:
        """Whether the layer caches keys and values, or latents."""
        return bool(self.c_layer.num_heads)

    @property
    def has_mixer(self) -> bool:
        """Whether the layer has a first half."""
        return self.has_attention or self.recurrent is not None

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has a feed-forward, its second half."""
        return self.intermediate_size > 0 or self.experts is not None

    @property
    def has_dense_and_experts(self) -> bool:
        """Whether the feed-forward is a dense one and experts side by side, each between norms of its own."""
        return self.intermediate_size > 0 and self.experts is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that the linear layers' weights take."""
        dense = sum(linear.num_bytes for linear in (self.qkv, self.output, self.gate_up, self.down))
        added = (self.own_gate, self.own_projection, self.laurel_left, self.laurel_right)
        parts = (*added, self.experts, self.latent, self.recurrent)
        return dense + sum(part.num_bytes for part in parts if part is not None)

    def set_norm(self, name: NormName, weight: torch.Tensor) -> None:
        """Set the weights of an RMSNorm. Every norm is optional, except those of a dense feed-forward beside experts.

        [hidden_size]; of queries and keys [head_dim], or with ``norms_all_heads`` [num_heads * head_dim] and
        [num_kv_heads * head_dim].
        """
        assert name != "mlp_output_norm" or self._can_end_the_layer, "experts alone have no output norm"
        self._norms[name] = weight.float().contiguous()  # the structure has its address only
        setattr(self.c_layer, name, self._norms[name].data_ptr())

    @property
    def _can_end_the_layer(self) -> bool:
        return self.experts is None or self.has_dense_and_experts

    def set_output_scale(self, scale: float) -> None:
        """Set what the residual stream is multiplied by after the layer."""
        assert self.has_mlp
        assert self._can_end_the_layer, "experts alone do not scale the residual stream"
        if self.own_gate is None:
            self.c_layer.output_scale = scale
        else:
            self.c_layer.own_output_scale = scale

    def set_altup(self, altup: PackedAltUp) -> None:
        """Let the layer have several residual streams."""
        self.altup = altup
        self.c_layer.altup = altup.address

    def set_experts(self, experts: PackedExperts) -> None:
        """Let experts compute the feed-forward, beside the dense one if the layer has that."""
        self.experts = experts
        self.c_layer.experts = experts.address

    def set_recurrent(self, recurrent: PackedRecurrent) -> None:
        """Let a recurrent layer mix the tokens, in addition to the layer's own attention if it has heads."""
        assert not self.has_attention or "attention_output_norm" not in self._norms, "both would be normalized apart"
        self.recurrent = recurrent
        self.c_layer.recurrent = recurrent.address

    def set_rope(self, table: torch.Tensor) -> None:
        """Set the cosines and sines of all positions, float32 [length, 2, head_dim // 2]; without them none rotates."""
        assert table.dtype == torch.float32
        assert table.is_contiguous()
        self._rope = table  # the structure has its address only
        self.c_layer.rope = table.data_ptr()

    def set_growth(self, factors: torch.Tensor) -> None:
        """Set the factors of queries at every position, float32 [length]; without them there are none."""
        assert self.latent is None, "latents have their own"
        self._growth = factors.float().contiguous()  # the structure has its address only
        self.c_layer.growth = self._growth.data_ptr()

    def set_gate_up_weight(self, weight: Weight) -> None:
        """Set the weights of gate and up, one below the other: [2 * intermediate_size, hidden_size], unpadded."""
        assert self._has_mlp_gate, "there is no gate: set the weights of gate_up"
        for offset, half in enumerate(halves(weight)):
            self.gate_up.set_weight(half, every=2, offset=offset)

    def set_gate_up_bias(self, bias: torch.Tensor) -> None:
        """Set the biases of gate and up, [2 * intermediate_size], unpadded."""
        for offset, half in enumerate(bias.chunk(2)):
            self.gate_up.set_bias(half, every=2, offset=offset)

"""ModelConfig: what a checkpoint's config.json says, reduced to what the decoder needs.

This module checks what files/hf_config.py has read, reduces it to typed fields, and rejects what the decoder would
compute wrongly. It does not touch weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.kv.layer_cache import KeyValue, LayerCache, SharedWith
from engine.models.config.families.architectures import PROVEN
from engine.models.config.families.table import ARCHITECTURES, Family, NormPlacement, QKNorm
from engine.models.config.files.config_json import num_positions
from engine.models.config.model_shape import AttentionShape, ModelShape, attends_causally
from engine.models.config.shapes.altup import AltUpShape
from engine.models.config.shapes.dense import (
    dense_activation,
    gate_cutoffs,
    intermediate_sizes,
    per_layer_embedding,
)
from engine.models.config.shapes.experts import ExpertsShape
from engine.models.config.shapes.factors import attention_options, read_factors
from engine.models.config.shapes.heads import KVHeads, LayerHeads, require_usual_layers, with_usual_heads
from engine.models.config.shapes.latent import LatentShape
from engine.models.config.shapes.mixers import Mixer, RecurrentShape, layer_types, read_mixers, read_recurrent
from engine.models.config.shapes.query_growth import QueryGrowth
from engine.models.config.shapes.rope import RopeConfig, check_longrope_length
from engine.models.config.shapes.weight_scales import WeightScales
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import read_count, require_integer
from engine.models.config.values.rounded import rounded
from kernels.attention.window import Chunk, Window
from kernels.layer_ops.base import Activation

__all__ = ["ModelConfig"]

_POSITIONS_WITHOUT_LIMIT = 2**18  # of models without attention, whose configs name no limit


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """The shape of one decoder-only model that our own decoder computes.

    Attributes:
        num_kv_heads, head_dim: of the layers that ``layer_heads`` does not name: see ``kv_heads``.
        layer_heads: how single attention layers differ.
        qk_norm: the RMSNorm of queries and keys.
        norms: where a layer's RMSNorms are; with ``norms_add_one`` they multiply by 1 + their weight.
        recurrent_norms: where those of recurrent layers are.
        embedding_multiplier: of the embeddings, not rounded; see ``embedding_multiplier_in``.
        attention_scale: factor of the queries' products with keys.
        attention_softcap, logits_softcap: C of C * tanh(score / C), which replaces each score; None: no soft-cap.
        logits_divisor: what the logits are divided by, before their soft-cap.
        residual_multiplier: of what attention and feed-forward add to the hidden states.
        normalizes_values: values are divided by the root mean square of their head.
        has_layer_scalars: each layer's output is multiplied by a number that the checkpoint stores.
        per_layer_width: elements of an embedding that each layer has of each token; 0: there is none.
        per_layer_vocab_size: ids in that embedding; others have the one of id 0.
        intermediate_sizes: features of dense feed-forwards that do not have ``intermediate_size`` of them, by layer.
        gate_cutoffs: of layers whose feed-forwards drop small gates: see ``shapes.dense.gate_cutoffs``.
        altup: the residual streams; None: there is one.
        windows: of each layer; None: it attends to everything.
        query_growth: of queries in layers without RoPE; None: they have no factor. That of latents is in ``latent``.
        mixers: what mixes the tokens of each layer.
        recurrent: the recurrent layers; None: there are none.
        latent: latent attention; None: a layer caches keys and values.
        num_mtp_layers: layers after the last one that may be stored, which predict further tokens.
        without_feed_forward: indices of the layers that only mix tokens.
        gates_attention: attention's output is multiplied by the sigmoid of a gate, a projection of its input.
        has_feed_forward_gate: dense feed-forwards are gated; else they square what a ReLU leaves.
        weight_scales: factors of weights and biases, by the projections' names, that are applied when they are loaded.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_heads: LayerHeads = field(default_factory=LayerHeads)
    rms_norm_eps: float
    tie_word_embeddings: bool
    family: Family
    qk_norm: QKNorm
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Activation
    norms: NormPlacement
    recurrent_norms: NormPlacement
    norms_add_one: bool
    embedding_multiplier: float
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    logits_divisor: float
    residual_multiplier: float
    windows: tuple[Window | None, ...]
    rope: RopeConfig
    experts: ExpertsShape | None = None  # None: every layer's feed-forward is dense
    mixers: tuple[Mixer, ...]
    recurrent: RecurrentShape | None = None
    latent: LatentShape | None = None
    query_growth: QueryGrowth | None = None
    num_mtp_layers: int = 0
    without_feed_forward: frozenset[int] = frozenset()
    gates_attention: bool = False
    has_feed_forward_gate: bool = True
    normalizes_values: bool = False
    has_layer_scalars: bool = False
    per_layer_width: int = 0
    per_layer_vocab_size: int = 0
    intermediate_sizes: Mapping[int, int] = field(default_factory=dict)
    gate_cutoffs: Mapping[int, float] = field(default_factory=dict)
    altup: AltUpShape | None = None
    weight_scales: WeightScales = field(default_factory=WeightScales)

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError if a model with experts needs what only dense feed-forwards support."""
        if self.experts is None or self.experts.is_beside_dense or self.recurrent is not None:
            return
        for name, value, computed in (
            ("activation", self.activation, "silu"),
            ("norms", self.norms, "before"),
            ("residual_multiplier", self.residual_multiplier, 1.0),
        ):
            if value != computed:
                raise UnsupportedModelError(
                    f"'{self.architecture}' has experts and {name}={value}; only {computed} is supported with experts"
                )

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.experts is not None and layer in self.experts.layers

    def has_feed_forward(self, layer: int) -> bool:
        """Return whether a layer has a feed-forward, dense or of experts."""
        return layer not in self.without_feed_forward

    def has_dense(self, layer: int) -> bool:
        """Return whether a layer has a dense feed-forward."""
        return self.has_feed_forward(layer) and (not self.has_experts(layer) or self.norms_inside(layer))

    def norms_inside(self, layer: int) -> bool:
        """Return whether a layer has a dense feed-forward and experts side by side, with norms of their own."""
        return self.experts is not None and self.experts.is_beside_dense and self.has_experts(layer)

    def intermediate_size_of(self, layer: int) -> int:
        """Return the features of a layer's dense feed-forward."""
        return self.intermediate_sizes.get(layer, self.intermediate_size)

    def has_qk_norm(self, layer: int) -> bool:
        """Return whether an attention layer has norms of queries and keys."""
        return self.qk_norm != "none" and (self.qk_norm != "unit" or self.rope.tables[layer] is not None)

    def grows_queries(self, layer: int) -> bool:
        """Return whether queries of an attention layer have a factor that grows with their position."""
        return self.query_growth is not None and self.rope.tables[layer] is None

    def kv_heads(self, layer: int) -> KVHeads:
        """Return the heads of an attention layer's keys and values."""
        return self.layer_heads.kv_heads.get(layer) or KVHeads(self.num_kv_heads, self.head_dim)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Elements of a head in each attention layer."""
        has_attention = (layer for layer in range(self.num_layers) if self.mixers[layer] in ("attention", "both"))
        return tuple(self.kv_heads(layer).dim for layer in has_attention)

    @property
    def rope_widths(self) -> list[int]:
        """Elements of the heads that each of ``rope``'s tables rotates."""
        if self.latent is not None:
            return [self.latent.rope_dim] * len(self.rope.layer_types)
        return [
            self.kv_heads(self.rope.tables.index(table)).dim if table in self.rope.tables else self.head_dim
            for table in range(len(self.rope.layer_types))
        ]

    @property
    def attention(self) -> AttentionShape:
        """The attention layers."""
        return AttentionShape(num_heads=self.num_heads, windows=frozenset(self.windows))

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """What the layers cache, one after another: an attention layer keys and values, a recurrent one a state."""
        return tuple(cache for layer in range(self.num_layers) for cache in self._caches_of(layer))

    def first_cache(self, layer: int) -> int:
        """Return the index in ``layer_caches`` of the first cache of a layer."""
        return sum(len(self._caches_of(before)) for before in range(layer))

    def _caches_of(self, layer: int) -> list[LayerCache]:
        mixer, caches = self.mixers[layer], list[LayerCache]()
        if mixer in ("attention", "both"):
            heads, source = self.kv_heads(layer), self.layer_heads.shared.get(layer)
            own = KeyValue(heads.count, heads.dim, heads.dim, self.windows[layer])
            if self.latent is not None:
                caches += self.latent.caches_of(layer)
            else:
                caches.append(own if source is None else SharedWith(self.first_cache(source)))
        if mixer in ("recurrent", "both"):
            assert self.recurrent is not None
            caches.append(self.recurrent.state)
        return caches

    def check_options(self, *, max_model_len: int, tensor_parallel_size: int, quantization: str | None) -> None:
        """Raise ConfigError if the ranks cannot share the model, or LongRoPE cannot serve the context."""
        self.shard(tensor_parallel_size)
        check_longrope_length(self.longrope_length, max_model_len)

    def embedding_multiplier_in(self, dtype: torch.dtype) -> float:
        """Return what embeddings of ``dtype`` are multiplied by."""
        if not self.family.scales_embedding:
            return self.embedding_multiplier
        return rounded(self.embedding_multiplier, dtype)  # Gemma was trained with the rounded number

    def require_divisible(self) -> None:
        """Raise UnsupportedModelError if tensor-parallel ranks cannot share the model, whatever their number."""
        if self.altup is not None:
            raise UnsupportedModelError(
                f"tensor_parallel_size over 1 is not supported for '{self.architecture}', whose feed-forwards compare "
                "gates with the mean of all of them; set it to 1"
            )
        if self.qk_norm == "projection":
            remedy = "set model_impl to transformers" if self.architecture in PROVEN else "set it to 1"
            raise UnsupportedModelError(
                f"tensor_parallel_size over 1 is not supported for '{self.architecture}', whose norms of queries and "
                f"keys are over all heads; {remedy}"
            )

    def shard(self, size: int) -> ModelConfig:
        """Return the shape of the share that one of ``size`` tensor-parallel ranks computes.

        If there are fewer KV heads than ranks, they are replicated. The vocabulary is divided in sharding.py.

        Raises:
            ConfigError: if the heads or the feed-forward cannot be divided by ``size``.
            UnsupportedModelError: if a norm is over all heads, or gates are compared with the mean of all.
        """
        if size > 1:
            self.require_divisible()
        has_dense = any(self.has_dense(layer) for layer in range(self.num_layers))
        return replace(
            self,
            num_heads=divided(self.num_heads, size, "attention heads"),
            num_kv_heads=KVHeads(self.num_kv_heads, self.head_dim).shard(size).count,
            layer_heads=self.layer_heads.shard(size),
            intermediate_size=divided(self.intermediate_size, size, "feed-forward features") if has_dense else 0,
            intermediate_sizes={
                layer: divided(features, size, "feed-forward features")
                for layer, features in self.intermediate_sizes.items()
            },
            experts=None if self.experts is None else self.experts.shard(size),
            recurrent=None if self.recurrent is None else self.recurrent.shard(size),
        )

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Read a transformers config.

        Raises:
            UnsupportedModelError: for an architecture, activation or RoPE type that the decoder does not compute.
            ModelLoadError: for values that no model has.
        """
        architecture = (getattr(config, "architectures", None) or ["none"])[0]
        family = ARCHITECTURES.get(architecture)
        if family is None:
            raise UnsupportedModelError(
                f"architecture '{architecture}' is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        require_usual_layers(config, family)
        attention_bias = bool(getattr(config, "attention_bias", False))
        mixers = read_mixers(config, family)
        latent = LatentShape.from_hf(config, family) if family.has_latents else None
        has_attention = bool(set(mixers) & {"attention", "both"})
        num_heads, num_kv_heads, head_dim = (0, 0, 0)
        if has_attention:
            num_heads, num_kv_heads, head_dim = _heads(with_usual_heads(config, family), latent)
        if not attends_causally(config):
            raise UnsupportedModelError(
                "use_bidirectional_attention is not supported, only causal attention; docs/models.md lists what is "
                "served"
            )
        rope = RopeConfig.from_hf(config, family, head_dim if latent is None else latent.rope_dim)
        kinds = layer_types(config, family) if family.has_single_halves else None
        layer_heads, windows = LayerHeads.from_hf(config, family), _windows(config, family)
        features, other_features = intermediate_sizes(config, layer_heads.shared)
        per_layer_width, per_layer_vocab_size = per_layer_embedding(config, family)
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=features,
            intermediate_sizes=other_features,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layer_heads=layer_heads,
            rms_norm_eps=getattr(config, family.eps_field),
            max_position_embeddings=num_positions(
                getattr(config, "max_position_embeddings", _POSITIONS_WITHOUT_LIMIT),
                getattr(config, "rope_parameters", None),
            ),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            family=family,
            qk_norm="none" if family.qk_norm == "unit" and not config.use_qk_norm else family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            activation=dense_activation(config, family),
            norms=family.norms,
            recurrent_norms=family.recurrent_norms or family.norms,
            norms_add_one=family.norms_add_one,
            windows=windows,
            experts=None if family.experts is None else ExpertsShape.from_hf(config, family.experts),
            mixers=mixers,
            recurrent=read_recurrent(config, family) if set(mixers) & {"recurrent", "both"} else None,
            without_feed_forward=frozenset(i for i, kind in enumerate(kinds or ()) if kind not in ("mlp", "moe")),
            latent=latent,
            query_growth=QueryGrowth.of_temperature(config) if family.grows_queries and latent is None else None,
            num_mtp_layers=read_count(config, "num_nextn_predict_layers") if family.has_mtp_layers else 0,
            gates_attention=family.gates_attention,
            has_feed_forward_gate=family.has_feed_forward_gate,
            normalizes_values=family.normalizes_values,
            has_layer_scalars=family.has_layer_scalars,
            per_layer_width=per_layer_width,
            per_layer_vocab_size=per_layer_vocab_size,
            gate_cutoffs=gate_cutoffs(config) if family.has_altup else {},
            altup=AltUpShape.from_hf(config) if family.has_altup else None,
            weight_scales=WeightScales.from_hf(config),
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
            attention_options=attention_options(config, family, [head_dim, *_dims(layer_heads)], windows),
            **read_factors(config, family, head_dim, latent),
            rope=rope,
            longrope_length=rope.longrope_length,
        )


def _heads(config: Any, latent: LatentShape | None) -> tuple[int, int, int]:
    """Return the number of heads, that of KV heads, and a query head's elements."""
    if latent is not None:
        return config.num_attention_heads, 1, latent.head_dim
    return config.num_attention_heads, require_integer(config, "num_key_value_heads"), _head_dim(config)


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        raise ModelLoadError(
            f"hidden_size={config.hidden_size} of num_attention_heads={config.num_attention_heads} is a head_dim "
            f"of {head_dim}, which must be even; correct config.json"
        )
    return head_dim


def _dims(layer_heads: LayerHeads) -> list[int]:
    return [heads.dim for heads in layer_heads.kv_heads.values()]


def _windows(config: Any, family: Family) -> tuple[Window | None, ...]:
    """Return each layer's window: Qwen names the sliding layers, Mistral's all slide when it has a window."""
    window: Window | None = getattr(config, "sliding_window", None)
    kinds = layer_types(config, family)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    of_kind = {"sliding_attention": window}
    if "chunked_attention" in kinds:
        of_kind["chunked_attention"] = Chunk(require_integer(config, "attention_chunk_size"))
    return tuple(map(of_kind.get, kinds))

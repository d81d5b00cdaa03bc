"""ModelConfig: what a checkpoint's config.json says, reduced to what the decoder needs.

transformers' AutoConfig reads all but the plainest config files (see without_transformers.py), as it knows their many
spellings. This module checks the result, reduces it to typed fields, and rejects what the decoder would compute
wrongly. It does not touch weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError, ModelLoadError, RequestError, UnsupportedModelError, shown
from engine.kv.layer_cache import KeyValue
from engine.models.config.config_json import num_positions, read_config_json
from engine.models.config.experts_shape import ExpertsShape
from engine.models.config.families import ARCHITECTURES, Family, NormPlacement, QKNorm
from engine.models.config.json_file import read_json
from engine.models.config.limits import require_integer
from engine.models.config.rope_config import RopeConfig, check_longrope_length
from engine.models.config.shape import AttentionShape, ModelShape, attends_causally
from engine.models.config.text_parts import text_config, text_fields
from engine.models.config.tokenizer_eos import tokenizer_eos_id
from engine.models.config.without_transformers import plain_config
from engine.models.gguf.config import gguf_generation_config
from engine.models.gguf.file import is_gguf, open_gguf
from engine.sampling_params import SamplingParams
from kernels.layer_ops.base import Activation

__all__ = ["GenerationDefaults", "ModelConfig", "load_hf_config", "read_with_transformers"]

logger = logging.getLogger(__name__)

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """The shape of one decoder-only model that our own decoder computes.

    Attributes:
        qk_norm: the RMSNorm of queries and keys.
        norms: where a layer's RMSNorms are; with ``norms_add_one`` they multiply by 1 + their weight.
        embedding_multiplier: of the embeddings, not rounded; see ``embedding_multiplier_in``.
        attention_scale: factor of the queries' products with keys.
        attention_softcap, logits_softcap: C of C * tanh(score / C), which replaces each score; None: no soft-cap.
        logits_divisor: what the logits are divided by, before their soft-cap.
        residual_multiplier: of what attention and feed-forward add to the hidden states.
        sliding_windows: of each layer, in tokens; None: it attends to everything.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    family: Family
    qk_norm: QKNorm
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Activation
    norms: NormPlacement
    norms_add_one: bool
    embedding_multiplier: float
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    logits_divisor: float
    residual_multiplier: float
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    experts: ExpertsShape | None = None  # None: every layer's feed-forward is dense

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError if a model with experts needs what only dense feed-forwards support."""
        if self.experts is None:
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

    @property
    def attention(self) -> AttentionShape:
        """The attention layers."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_windows=frozenset(self.sliding_windows),
        )

    @property
    def layer_caches(self) -> tuple[KeyValue, ...]:
        """What each layer caches."""
        return (KeyValue(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    def check_options(self, *, max_model_len: int, tensor_parallel_size: int, quantization: str | None) -> None:
        """Raise ConfigError if the ranks cannot share the model, or LongRoPE cannot serve the context."""
        self.shard(tensor_parallel_size)
        check_longrope_length(self.longrope_length, max_model_len)

    def embedding_multiplier_in(self, dtype: torch.dtype) -> float:
        """Return what embeddings of ``dtype`` are multiplied by."""
        if not self.family.scales_embedding:
            return self.embedding_multiplier
        return float(torch.tensor(self.embedding_multiplier, dtype=dtype))  # Gemma was trained with the rounded number

    def require_divisible(self) -> None:
        """Raise UnsupportedModelError if tensor-parallel ranks cannot share the model, whatever their number."""
        if self.qk_norm == "projection":
            raise UnsupportedModelError(
                f"tensor_parallel_size over 1 is not supported for '{self.architecture}', whose norms of queries and "
                "keys are over all heads; set model_impl to transformers"
            )

    def shard(self, size: int) -> ModelConfig:
        """Return the shape of the share that one of ``size`` tensor-parallel ranks computes.

        If there are fewer KV heads than ranks, they are replicated. The vocabulary is divided in sharding.py.

        Raises:
            ConfigError: if the heads or the feed-forward cannot be divided by ``size``.
            UnsupportedModelError: if a norm is over all heads.
        """
        if size > 1:
            self.require_divisible()
        has_dense = not all(self.has_experts(layer) for layer in range(self.num_layers))
        for name, count, divides in (
            ("attention heads", self.num_heads, self.num_heads % size == 0),
            ("KV heads", self.num_kv_heads, self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0),
            ("feed-forward features", self.intermediate_size, not has_dense or self.intermediate_size % size == 0),
        ):
            if not divides:
                raise ConfigError(
                    f"tensor_parallel_size={size} does not divide the model's {count} {name}; choose another size"
                )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
            experts=None if self.experts is None else self.experts.shard(size),
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
        attention_bias = bool(getattr(config, "attention_bias", False))
        head_dim = _head_dim(config)
        if not attends_causally(config):
            raise UnsupportedModelError(
                "use_bidirectional_attention is not supported, only causal attention; docs/models.md lists what is "
                "served"
            )
        rope = RopeConfig.from_hf(config, family, head_dim)
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=require_integer(config, "num_key_value_heads"),
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=num_positions(config.max_position_embeddings, config.rope_parameters),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            family=family,
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            activation=_activation(config, family),
            norms=family.norms,
            norms_add_one=family.norms_add_one,
            sliding_windows=_sliding_windows(config),
            experts=ExpertsShape.from_hf(config, has_options=family.has_expert_options) if family.has_experts else None,
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
            **_factors(config, family, head_dim),
            rope=rope,
            longrope_length=rope.longrope_length,
        )


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        raise ModelLoadError(
            f"hidden_size={config.hidden_size} of num_attention_heads={config.num_attention_heads} is a head_dim "
            f"of {head_dim}, which must be even; correct config.json"
        )
    return head_dim


def _activation(config: Any, family: Family) -> Activation:
    name = getattr(config, family.activation_field)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{family.activation_field}='{name}' is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _factors(config: Any, family: Family, head_dim: int) -> dict[str, Any]:
    """Return the multipliers and soft-caps of ModelConfig."""
    softcap = config.attn_logit_softcapping if family.caps_attention else None
    scale, embedding_multiplier = head_dim**-0.5, 1.0
    if family.has_query_scalar:
        scale = config.query_pre_attn_scalar**-0.5
    elif family.has_multipliers:
        scale, embedding_multiplier = config.attention_multiplier, config.embedding_multiplier
    if family.scales_embedding:
        embedding_multiplier = config.hidden_size**0.5
    return {
        "embedding_multiplier": embedding_multiplier,
        "attention_scale": scale,
        "attention_softcap": softcap,
        "attention_options": frozenset() if softcap is None else frozenset({"softcap"}),
        "logits_softcap": config.final_logit_softcapping if family.caps_logits else None,
        "logits_divisor": config.logits_scaling if family.has_multipliers else 1.0,
        "residual_multiplier": config.residual_multiplier if family.has_multipliers else 1.0,
    }


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's window: Qwen names the sliding layers, Mistral's all slide when it has a window."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return (window,) * int(config.num_hidden_layers)
    if unknown := set(layer_types) - set(_LAYER_TYPES):
        supported = ", ".join(_LAYER_TYPES)
        raise UnsupportedModelError(f"a layer of the type '{min(unknown)}' is not supported; supported: {supported}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def load_hf_config(path: str | Path) -> Any:
    """Read config.json as transformers does; reject checkpoints that need code of their own.

    Of a multimodal checkpoint it is the config of the text part.

    Raises:
        ConfigError: if the directory or its config.json does not exist.
        ModelLoadError: if it is malformed, or names remote code, an unknown architecture or format of weights.
    """
    raw = read_config_json(path)
    if (text := text_fields(raw)) is not raw:
        names = [fields["architectures"][0] for fields in (raw, text)]
        logger.info("Of %s the text part is served, as %s; requests with images or sound are rejected", *names)
    return plain_config(raw) or read_with_transformers(path)


def read_with_transformers(path: str | Path) -> Any:
    """Return transformers' config of a checkpoint that ``read_config_json`` has accepted, or of its text part.

    Raises:
        ModelLoadError: if transformers refuses it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__  # slow to import

    directory = Path(path)
    raw = read_config_json(directory) if is_gguf(directory) else read_json(directory / "config.json")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelLoadError(
            f"config.json of '{path}' has the model_type {shown(model_type)}, which transformers {__version__} does "
            "not know; docs/models.md lists what is served"
        )
    try:
        if is_gguf(directory):
            return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        return text_config(AutoConfig.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True))
    except ModelLoadError:
        raise
    except Exception as error:  # its classes check some values, and compute with others
        raise _unreadable(directory, error) from error


def _unreadable(path: str | Path, error: Exception) -> ModelLoadError:
    lines = str(error).split("\n")
    problem = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return ModelLoadError(
        f"config.json of '{path}' could not be read: {type(error).__name__}: {problem}; correct it, or "
        "download it again"
    )


@dataclass(frozen=True)
class GenerationDefaults:
    """How answers end and are sampled, as generation_config.json (or else config.json) has it, and the tokenizer."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any]

    @classmethod
    def load(cls, path: str | Path, hf_config: Any, *, with_tokenizer: bool = False) -> GenerationDefaults:
        """Read the EOS ids, one or many, and the sampling defaults (temperature, top_p, top_k, min_p).

        Args:
            path: the checkpoint's directory.
            hf_config: its config.json, as transformers reads it.
            with_tokenizer: whether the tokenizer's EOS token ends answers, too. One without a logit is ignored.

        Raises:
            ModelLoadError: if the file is malformed, an id is outside the vocabulary or a default out of range.
        """
        file = Path(path) if is_gguf(path) else Path(path) / "generation_config.json"
        raw = _generation_config(file) if file.is_file() else {}
        eos = raw.get("eos_token_id")
        eos = hf_config.eos_token_id if eos is None else eos
        ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < hf_config.vocab_size:
                raise ModelLoadError(
                    f"eos_token_id {token_id!r} of '{path}' is outside the vocabulary of {hf_config.vocab_size}; "
                    "correct its generation_config.json or config.json"
                )
        extra = tokenizer_eos_id(path) if with_tokenizer else None
        if extra is not None and extra not in ids and extra < hf_config.vocab_size:
            ids = (*ids, extra)
        sampling = {key: raw[key] for key in ("temperature", "top_p", "top_k", "min_p") if raw.get(key) is not None}
        if raw.get("do_sample") is False:
            sampling = {"temperature": 0.0}
        if isinstance(sampling.get("top_k"), float) and sampling["top_k"].is_integer():
            sampling["top_k"] = int(sampling["top_k"])
        try:
            SamplingParams(**sampling)
        except RequestError as error:
            raise ModelLoadError(f"'{file}' sets defaults that are not valid: {error}") from error
        return cls(ids, sampling)


def _generation_config(file: Path) -> dict[str, Any]:
    return gguf_generation_config(open_gguf(file)) if is_gguf(file) else read_json(file)

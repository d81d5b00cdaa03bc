"""GatedDeltaShape: the layers with the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid, read from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.kv.layer_cache import State
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import require_conv_width, require_divisor, require_integer, require_silu

__all__ = ["GatedDeltaShape"]

StoredInputs = Literal["by_key_head", "qkv", "apart"]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaShape:
    """A gated delta net (Yang et al., 2024): a convolution, the gated delta rule, and a gated norm of each head.

    Attributes:
        num_heads: of values; each has a state.
        num_key_heads: of queries and keys; each serves num_heads // num_key_heads neighbouring heads of values.
        key_dim, value_dim: elements of a head.
        conv_width: tokens that the convolution sees, the token itself included.
        norm_eps: of the norm.
        largest_beta: betas are between 0 and it; with 2 a state may change its sign (Grazzi et al., 2024).
        stored: how the checkpoint stores the projections of the input: those of one key head after another, as
            Qwen3-Next does; those that the convolution reads in one tensor; or each apart, and the convolution's too.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    largest_beta: float
    stored: StoredInputs

    @property
    def inner_size(self) -> int:
        """Features that the output projection reads."""
        return self.num_heads * self.value_dim

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Channels of the convolution: queries, keys, values."""
        return (self.num_key_heads * self.key_dim,) * 2 + (self.inner_size,)

    @property
    def in_sections(self) -> tuple[int, ...]:
        """Outputs of the input projection: queries, keys, values, the norm's gate, and beta and decay of each head."""
        return (*self.conv_sections, self.inner_size, self.num_heads, self.num_heads)

    @property
    def state(self) -> State:
        """What a layer remembers of a sequence: the convolution's last inputs, and each head's matrix."""
        conv = (self.conv_width - 1, sum(self.conv_sections))
        return State((conv, (self.num_heads, self.key_dim, self.value_dim)))

    def shard(self, size: int) -> GatedDeltaShape:
        """Return the share of one of ``size`` tensor-parallel ranks; raise ConfigError if the heads do not divide."""
        return replace(
            self,
            num_heads=divided(self.num_heads, size, "value heads of linear attention"),
            num_key_heads=divided(self.num_key_heads, size, "key heads of linear attention"),
        )

    @classmethod
    def from_hf(cls, config: Any) -> GatedDeltaShape:
        """Read a transformers config.

        Raises:
            ModelLoadError: if a size is not an integer, or the heads of keys do not divide those of values.
            UnsupportedModelError: for an activation of the convolution other than SiLU.
        """
        require_silu(config, "hidden_act")
        is_olmo = config.model_type == "olmo_hybrid"
        return cls(
            num_heads=require_integer(config, "linear_num_value_heads"),
            num_key_heads=require_divisor(config, "linear_num_key_heads", "linear_num_value_heads"),
            key_dim=require_integer(config, "linear_key_head_dim"),
            value_dim=require_integer(config, "linear_value_head_dim"),
            conv_width=require_conv_width(config, "linear_conv_kernel_dim"),
            norm_eps=1e-5 if is_olmo else config.rms_norm_eps,  # transformers' class of OLMo's has it so
            largest_beta=2.0 if getattr(config, "linear_allow_neg_eigval", False) else 1.0,
            stored="apart" if is_olmo else "by_key_head" if config.model_type == "qwen3_next" else "qkv",
        )

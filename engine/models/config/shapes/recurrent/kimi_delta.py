"""KimiDeltaShape: the recurrent layers of Kimi Linear, read from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.errors import UnsupportedModelError, shown
from engine.kv.layer_cache import State
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import require_conv_width, require_integer, require_silu

__all__ = ["KimiDeltaShape"]

_OF_KIMI_K3 = ("gate_lower_bound", "use_full_rank_gate")  # fields that transformers' class ignores


@dataclass(frozen=True, kw_only=True)
class KimiDeltaShape:
    """Kimi delta attention (Kimi Linear, 2025): the gated delta rule with a decay of each element of a key.

    Decays and the gates of the output are computed of a few numbers, as many as a head has elements.

    Attributes:
        num_heads, head_dim: of queries, keys and values; each head has a state.
        conv_width: tokens that the convolution sees, the token itself included.
        norm_eps: of the norm.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float

    @property
    def inner_size(self) -> int:
        """Features that the output projection reads."""
        return self.num_heads * self.head_dim

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Channels of the convolution: queries, keys, values."""
        return (self.inner_size,) * 3

    @property
    def in_sections(self) -> tuple[int, ...]:
        """Outputs of the input projection: queries, keys, values, betas, what decays and what gates are computed of."""
        return (*self.conv_sections, self.num_heads, self.head_dim, self.head_dim)

    @property
    def state(self) -> State:
        """What a layer remembers of a sequence: the convolution's last inputs, and each head's matrix."""
        conv = (self.conv_width - 1, sum(self.conv_sections))
        return State((conv, (self.num_heads, self.head_dim, self.head_dim)))

    def shard(self, size: int) -> KimiDeltaShape:
        """Return the share of one of ``size`` tensor-parallel ranks; raise ConfigError if the heads do not divide."""
        return replace(self, num_heads=divided(self.num_heads, size, "heads of linear attention"))

    @classmethod
    def from_hf(cls, config: Any) -> KimiDeltaShape:
        """Read a transformers config.

        Raises:
            ModelLoadError: if a size is not an integer.
            UnsupportedModelError: for an activation of the convolution other than SiLU, or gates as Kimi K3 has them.
        """
        require_silu(config, "hidden_act")
        published = getattr(config, "linear_attn_config", None) or {}
        for name in _OF_KIMI_K3:
            if published.get(name):
                raise UnsupportedModelError(
                    f"linear_attn_config has {name}={shown(published[name])}, which is not supported; docs/models.md "
                    "lists what is served"
                )
        return cls(
            num_heads=require_integer(config, "linear_num_heads"),
            head_dim=require_integer(config, "linear_head_dim"),
            conv_width=require_conv_width(config, "linear_conv_kernel_dim"),
            norm_eps=config.rms_norm_eps,
        )

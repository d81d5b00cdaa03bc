"""MambaShape: the Mamba 2 layers of Granite 4, Bamba, Falcon-H1, Nemotron-H and Mamba 2 itself, read from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.errors import ModelLoadError, shown
from engine.kv.layer_cache import State
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import require_conv_width, require_divisor, require_integer, require_silu

__all__ = ["GatedNorm", "MambaShape"]

GatedNorm = Literal["none", "after_gate", "before_gate"]  # of a Mamba layer's output, whose gate is always applied

_FIELDS = {  # by the config's field for the number of heads
    "mamba_n_heads": ("mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    "mamba_num_heads": ("mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "num_heads": ("head_dim", "n_groups", "state_size", "conv_kernel"),
}


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """A Mamba 2 layer (Dao and Gu, 2024): a convolution, a selective state space, and a gated norm.

    Attributes:
        num_heads, head_dim: of the inputs; each head has a state.
        num_groups: of keys and queries (B and C); each serves num_heads // num_groups neighbouring heads.
        state_size: elements of a key or query.
        conv_width: tokens that the convolution sees, the token itself included.
        conv_bias, in_bias, out_bias: whether the convolution and the projections have biases.
        step_limits: the smallest and the largest step.
        norm: the RMSNorm of the output, over the heads of a group together.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    step_limits: tuple[float, float]
    norm: GatedNorm

    @property
    def inner_size(self) -> int:
        """Features that the output projection reads."""
        return self.num_heads * self.head_dim

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Channels of the convolution: inputs, keys, queries."""
        return (self.inner_size,) + (self.num_groups * self.state_size,) * 2

    @property
    def in_sections(self) -> tuple[int, ...]:
        """Outputs of the input projection: the gate, what the convolution reads, and each head's step."""
        return (self.inner_size, *self.conv_sections, self.num_heads)

    @property
    def state(self) -> State:
        """What a layer remembers of a sequence: the convolution's last inputs, and each head's matrix."""
        conv = (self.conv_width - 1, sum(self.conv_sections))
        return State((conv, (self.num_heads, self.head_dim, self.state_size)))

    def shard(self, size: int) -> MambaShape:
        """Return the share of one of ``size`` tensor-parallel ranks; raise ConfigError if heads do not divide."""
        return replace(
            self,
            num_heads=divided(self.num_heads, size, "heads of Mamba layers"),
            num_groups=divided(self.num_groups, size, "groups of heads of Mamba layers"),
        )

    @classmethod
    def from_hf(cls, config: Any) -> MambaShape:
        """Read a transformers config.

        Raises:
            ModelLoadError: if a size is not an integer, groups do not divide the heads, or the limits are not two
                numbers.
            UnsupportedModelError: for an activation other than SiLU.
        """
        require_silu(config, "mamba_hidden_act" if hasattr(config, "mamba_hidden_act") else "hidden_act")
        heads = next(name for name in _FIELDS if hasattr(config, name))
        head_dim, groups, state_size, conv_width = _FIELDS[heads]
        in_bias = bool(getattr(config, "mamba_proj_bias" if heads == "mamba_n_heads" else "use_bias"))
        return cls(
            num_heads=require_integer(config, heads),
            head_dim=require_integer(config, head_dim),
            num_groups=require_divisor(config, groups, heads),
            state_size=require_integer(config, state_size),
            conv_width=require_conv_width(config, conv_width),
            conv_bias=bool(config.mamba_conv_bias if heads == "mamba_n_heads" else config.use_conv_bias),
            in_bias=in_bias,
            out_bias=bool(getattr(config, "projectors_bias", in_bias)),
            step_limits=_step_limits(config),
            norm=_norm(config),
        )


def _step_limits(config: Any) -> tuple[float, float]:
    limits = config.time_step_limit
    if config.model_type == "nemotron_h":  # transformers reads the lower limit from another field
        limits = (config.time_step_min, float("inf"))
    match limits:
        case [int() | float() as low, int() | float() as high] if 0 <= low < high:
            return float(low), float(high)
    raise ModelLoadError(f"time_step_limit={shown(limits)} is not two growing numbers from 0; correct config.json")


def _norm(config: Any) -> GatedNorm:
    if not getattr(config, "mamba_rms_norm", True):
        return "none"
    return "before_gate" if getattr(config, "mamba_norm_before_gate", False) else "after_gate"

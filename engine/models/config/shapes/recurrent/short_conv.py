"""ConvShape: the short convolutions of LFM2, read from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.kv.layer_cache import State
from engine.models.config.values.divided import divided
from engine.models.config.values.limits import require_conv_width

__all__ = ["ConvShape"]


@dataclass(frozen=True, kw_only=True)
class ConvShape:
    """A convolution of each channel over the last tokens, gated before and after.

    Attributes:
        inner_size: channels.
        conv_width: tokens that the convolution sees, the token itself included.
        has_bias: whether the projections and the convolution have biases.
    """

    inner_size: int
    conv_width: int
    has_bias: bool

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Channels of the convolution."""
        return (self.inner_size,)

    @property
    def in_sections(self) -> tuple[int, ...]:
        """Outputs of the input projection: the gates before and after the convolution, and the values."""
        return (self.inner_size,) * 3

    @property
    def state(self) -> State:
        """What a layer remembers of a sequence: the convolution's last inputs."""
        return State(((self.conv_width - 1, self.inner_size),))

    def shard(self, size: int) -> ConvShape:
        """Return the share of one of ``size`` tensor-parallel ranks; raise ConfigError if channels do not divide."""
        return replace(self, inner_size=divided(self.inner_size, size, "channels of convolutions"))

    @classmethod
    def from_hf(cls, config: Any) -> ConvShape:
        """Read a transformers config of LFM2; raise ModelLoadError if a size is not an integer."""
        return cls(
            inner_size=config.hidden_size,
            conv_width=require_conv_width(config, "conv_L_cache"),
            has_bias=bool(config.conv_bias),
        )

"""Convolutions that have more taps than the C kernels have room for are refused."""

from __future__ import annotations

import pytest

from engine.errors import ModelLoadError
from engine.models.config.model_config import ModelConfig
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model

FIELDS = {
    "qwen3.5": "linear_conv_kernel_dim",
    "kimi-linear": "linear_conv_kernel_dim",
    "lfm2": "conv_L_cache",
    "falcon-h1": "mamba_d_conv",
    "nemotron-3-super": "conv_kernel",
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_convolution_has_2_to_16_taps(name: str) -> None:
    config, field = build_recurrent_model(name).config, FIELDS[name]
    for width in (2, 16):
        setattr(config, field, width)
        recurrent = ModelConfig.from_hf(config).recurrent
        assert recurrent is not None
        assert recurrent.conv_width == width
    for width in (1, 17, 256):
        setattr(config, field, width)
        with pytest.raises(ModelLoadError, match=f"{field}={width} is not an integer from 2 to 16; correct config"):
            ModelConfig.from_hf(config)

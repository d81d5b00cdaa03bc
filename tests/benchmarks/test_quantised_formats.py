"""Checkpoints in quantised formats that a benchmark writes: each has nearly the weights before, and stays codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.quantised_formats import FORMATS, write_quantised
from engine.models.checkpoint.checkpoint import open_checkpoint
from tests.engine.checkpoints import build_model, save_checkpoint

# Root mean squares of the errors over those of the weights: of normal weights rounded to this format.
LARGEST_ERRORS = {"FP8": 0.03, "bitsandbytes int8": 0.011, "bitsandbytes NF4": 0.11, "NVFP4": 0.11, "MXFP4": 0.17}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_nearly_the_weights_before(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
    save_checkpoint(build_model("qwen3", **sizes, head_dim=32, num_hidden_layers=1), tmp_path / "plain")
    write_quantised(tmp_path / "plain", tmp_path / "quantised", FORMATS[name])
    largest = next((error for key, error in LARGEST_ERRORS.items() if name.startswith(key)), 0.14)
    before = load_file(tmp_path / "plain" / "model.safetensors")
    with open_checkpoint(tmp_path / "quantised") as checkpoint:
        assert sorted(checkpoint.names) == sorted(before)
        for weight_name, weight in before.items():
            read = checkpoint.read(weight_name).float()
            if not weight_name.endswith("_proj.weight"):
                assert torch.equal(read, weight.float())
                continue
            assert checkpoint.code_format(weight_name) is not None
            error = float((read - weight.float()).norm() / weight.float().norm())
            assert largest / 4 < error < largest, weight_name

"""Layers that predict further tokens (MTP), as published beside a model, are not loaded, quantised or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from tests.engine.models.adapter.conftest import load
from tests.engine.models.adapter.tiny_models import build_model
from tests.engine.models.checkpoint.formats.quantised import FILE, check_tokens, is_linear, save_quantised
from tests.engine.models.checkpoint.formats.test_fp8 import fp8, fp8_block

# By architecture: what the names of these tensors begin with, and the field that says how many layers there are.
FURTHER = {
    "Glm4MoeForCausalLM": ("model.layers.2.", "num_nextn_predict_layers"),
    "HYV3ForCausalLM": ("model.layers.2.", "num_nextn_predict_layers"),
    "Ernie4_5_MoeForCausalLM": ("model.mtp_block.0.", "num_nextn_predict_layers"),
    "ExaoneMoeForCausalLM": ("mtp.layers.0.", "num_nextn_predict_layers"),
    "MiMoV2FlashForCausalLM": ("model.mtp.layers.0.", "num_nextn_predict_layers"),
}
CASES = [name if name.startswith("Glm4") else pytest.param(name, marks=pytest.mark.long) for name in FURTHER]


@pytest.mark.parametrize("architecture", CASES)
def test_further_layers_are_not_loaded(architecture: str, tmp_path: Path) -> None:
    begin, field = FURTHER[architecture]
    model = build_model(architecture)
    quantised = save_quantised(model, tmp_path, fp8_block, fp8() | {field: 1}, chosen=lambda name: is_linear(name))
    file = quantised.path / FILE
    tensors = load_file(file)
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    further = {name.replace("model.layers.1.", begin): tensor.clone() for name, tensor in last.items()}
    assert any(".experts." in name for name in further)
    further |= {f"{begin}{name}.weight": torch.zeros(32, 64) for name in ("eh_proj", "shared_head.head")}
    save_file(tensors | further, file, {"format": "pt"})
    check_tokens(quantised)


def test_others_after_the_last_layer_are_refused(tmp_path: Path) -> None:
    quantised = save_quantised(build_model("Glm4MoeForCausalLM"), tmp_path, fp8_block, fp8())
    file, name = quantised.path / FILE, "model.layers.3.enorm.weight"
    save_file(load_file(file) | {name: torch.zeros(32)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"'{name}' of '.*' is unexpected"):
        load(quantised.path)

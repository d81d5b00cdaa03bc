"""The check of a checkpoint's headers: what it costs when there are thousands of experts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading

from engine.models.adapter import fit
from engine.models.adapter.attention import NAME, register
from engine.models.adapter.fit import require_fit
from engine.models.checkpoint.checkpoint import open_checkpoint

LAYERS, EXPERTS, HIDDEN, INNER = 2, 32, 8, 4
SHAPE = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
}


def build() -> Any:
    register()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3_moe", **SHAPE), dtype=torch.bfloat16, attn_implementation=NAME
        )


def write_experts_one_by_one(model: Any, path: Path) -> int:
    """Write zeros, with each expert's matrices by themselves, as published; return the number of tensors."""
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items() if ".experts." not in name}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes |= {f"{prefix}.{module}.weight": [INNER, HIDDEN] for module in ("gate_proj", "up_proj")}
            shapes[f"{prefix}.down_proj.weight"] = [HIDDEN, INNER]
    header, size = {}, 0
    for name, shape in shapes.items():
        stop = size + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, stop]}
        size = stop
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return len(shapes)


def test_converters_are_copied_for_each_parameter_and_not_for_each_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copies = build(), 0

    def deepcopy(converter: Any) -> Any:
        nonlocal copies
        copies += 1
        return copy.deepcopy(converter)

    monkeypatch.setattr(core_model_loading, "deepcopy", copy.deepcopy)  # which is replaced, so restore it at the end
    monkeypatch.setattr(fit, "copy", SimpleNamespace(deepcopy=deepcopy))
    count = write_experts_one_by_one(model, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(require_fit(model, checkpoint, torch.bfloat16)) == count == len(set(checkpoint.names))
    # Two parameters a layer are joined of experts; a copy that is not needed is kept for the next parameter.
    assert LAYERS * 2 <= copies <= LAYERS * 2 + 2


def test_no_progress_is_shown_while_only_headers_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build()
    write_experts_one_by_one(model, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        require_fit(model, checkpoint, torch.bfloat16)
    assert capsys.readouterr().err == ""

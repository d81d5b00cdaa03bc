"""Weights of Gemma 3n and 4 as checkpoints store them: quantised, or with a tensor for each expert; also by ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.models.checkpoint.formats.quantised import save_quantised
from tests.engine.models.checkpoint.formats.test_mlx import encode
from tests.engine.models.decoder.gemma.gemma_families import build_gemma_model
from tests.engine.models.decoder.recurrent.test_formats import FORMATS, parameters
from tests.engine.models.decoder.saved_models import Saved

_CHOSEN = re.compile(r"layers\..*(_proj|_projection|_gate)\.weight$")
RANKS = ((0, 1), (0, 2), (1, 2))
ALTUP = "gemma-3n-e4b"  # which ranks do not share
CASES = [
    ("gemma-4-31b", "fp8 in blocks"),
    ("gemma-4-e4b", "int4 in groups"),
    (ALTUP, "fp8 in blocks"),
    pytest.param("gemma-4-e4b", "nvfp4", marks=pytest.mark.long),
    pytest.param("gemma-4-12b", "int4 in groups", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_parameters_are_those_of_the_dequantised_checkpoint(name: str, form: str, tmp_path: Path) -> None:
    encode, config = FORMATS[form]
    model = build_gemma_model(name)
    quantised = save_quantised(
        model, tmp_path, encode, config, chosen=lambda weight: _CHOSEN.search(weight) is not None
    )
    assert any("k_proj" in weight for weight in quantised.values)
    for rank, size in RANKS[: 1 if name == ALTUP else None]:
        expected = parameters(tmp_path / "plain", rank, size)
        computed = parameters(quantised.path, rank, size)
        assert computed.keys() == expected.keys()
        for weight, value in expected.items():
            assert torch.equal(computed[weight], value), weight


def test_a_tensor_for_each_expert_is_read_like_a_stack(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    path = Path(saved("gemma-4-26b-a4b").path)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if ".experts." in name]:
        module, _, matrix = name.rpartition(".")
        for expert, weight in enumerate(weights.pop(name)):
            halves = (
                {"gate_proj": weight[:32], "up_proj": weight[32:]} if matrix == "gate_up_proj" else {matrix: weight}
            )
            weights |= {f"{module}.{expert}.{part}.weight": half.clone() for part, half in halves.items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for rank, size in RANKS:
        expected, computed = parameters(path, rank, size), parameters(tmp_path, rank, size)
        assert computed.keys() == expected.keys()
        assert all(torch.equal(computed[name], value) for name, value in expected.items())


def test_experts_are_stacked_as_mlx_stacks_them(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    path = Path(saved("gemma-4-26b-a4b").path)
    plain = load_file(path / "model.safetensors")
    coded, values = dict(plain), dict(plain)
    for name in [name for name in plain if ".experts." in name]:
        module, _, matrix = name.rpartition(".")
        del coded[name]
        parts = {"gate_proj": 0, "up_proj": 1} if matrix == "gate_up_proj" else {matrix: 0}
        decoded = []
        for part, half in parts.items():
            encoded = [encode(weight.chunk(len(parts))[half].contiguous(), 4, 32) for weight in plain[name]]
            decoded.append(torch.stack([weight.values for weight in encoded]))
            for kind in ("weight", "scales", "biases"):
                stack = torch.stack([weight.tensors[kind].view(torch.uint8) for weight in encoded])
                coded[f"{module}.switch_glu.{part}.{kind}"] = stack.view(encoded[0].tensors[kind].dtype)
        values[name] = torch.cat(decoded, dim=1)
    sizes = {"quantization": {"bits": 4, "group_size": 32}}
    for folder, weights, extra in (("coded", coded, sizes), ("values", values, {})):
        (tmp_path / folder).mkdir()
        save_file(weights, tmp_path / folder / "model.safetensors", {"format": "pt"})
        fields = json.loads((path / "config.json").read_text()) | extra
        (tmp_path / folder / "config.json").write_text(json.dumps(fields))
    for rank, size in RANKS:
        expected, computed = (parameters(tmp_path / folder, rank, size) for folder in ("values", "coded"))
        assert computed.keys() == expected.keys()
        assert all(torch.equal(computed[name], value) for name, value in expected.items())

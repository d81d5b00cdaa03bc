"""Quantised weights of a multimodal checkpoint's text part: its tokens, and experts that are stored transposed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.models.adapter.greedy_answers import check, make_prompts, oracle
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats.quantised import Encoded
from tests.engine.models.checkpoint.formats.test_fp8 import fp8, fp8_block, fp8_mistral
from tests.engine.models.multimodal.tiny_checkpoints import TINY, save

Encode = Callable[[str, torch.Tensor], Encoded]


def stacked(name: str, weight: torch.Tensor) -> Encoded:
    """Return the experts of a layer, with the index of the expert first."""
    members = [fp8_block(name, expert) for expert in weight]
    matrix = name.rpartition(".")[2]
    codes, scales = (
        torch.stack([member.tensors[end].view(torch.uint8) for member in members]).view(members[0].tensors[end].dtype)
        for end in ("weight", "weight_scale_inv")
    )
    return Encoded({matrix: codes, f"{matrix}_scale_inv": scales}, torch.stack([member.values for member in members]))


def quantise(path: Path, encode: Encode, config: dict[str, Any], *, in_text: bool) -> tuple[Path, int]:
    """Quantise the text part of a checkpoint; ``path`` gets the values. Return the quantised one, and how many."""
    quantised = Path(shutil.copytree(path, path.parent / "quantised"))
    count = 0
    for file in path.glob("*.safetensors"):
        plain, packed = load_file(file), {}
        for name, weight in list(plain.items()):
            if "visual" in name or "vision" in name or not name.endswith(("_proj.weight", "_proj")):
                packed[name] = weight
                continue
            is_stacked = not name.endswith(".weight")
            module = name.removesuffix(".weight")
            encoded = (stacked if is_stacked else encode)(module, weight.float())
            prefix = module.rpartition(".")[0] if is_stacked else module
            packed |= {f"{prefix}.{end}": tensor.contiguous().clone() for end, tensor in encoded.tensors.items()}
            plain[name] = encoded.values.contiguous()
            count += 1
        save_file(plain, file, {"format": "pt"})
        save_file(packed, quantised / file.name, {"format": "pt"})
    if (index := quantised / "model.safetensors.index.json").exists():
        weight_map = {name: file.name for file in quantised.glob("*.safetensors") for name in load_file(file)}
        index.write_text(json.dumps({"weight_map": weight_map}))
    written = json.loads((quantised / "config.json").read_text())
    (written["text_config"] if in_text else written).update(config)
    (quantised / "config.json").write_text(json.dumps(written))
    return quantised, count


@pytest.mark.parametrize(
    ("name", "encode", "config", "in_text"),
    [
        ("mistral3", fp8_mistral, fp8(weight_block_size=None), False),
        ("qwen3-vl-moe", fp8_block, fp8(), False),
        pytest.param(
            "gemma3",
            lambda _, weight: of_integers.encode(weight, "int4 symmetric"),
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                    "group_size": 32,
                }
            },
            True,
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_tokens_are_those_of_the_multimodal_class(
    name: str, encode: Encode, config: dict[str, Any], in_text: bool, tmp_path: Path
) -> None:
    save(name, tmp_path / "plain")
    quantised, count = quantise(tmp_path / "plain", encode, config, in_text=in_text)
    assert count >= 8
    model = getattr(transformers, TINY[name].architecture).from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = oracle(model, make_prompts())
    for model_impl in ("auto", "transformers"):
        check(str(quantised), (4, 7, True, 0.0), expected, model_impl=model_impl)

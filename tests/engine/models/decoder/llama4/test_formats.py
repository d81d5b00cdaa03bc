"""Checkpoints of Llama 4 in FP8: experts as llm-compressor divides them, and as FBGEMM stacks them. And a relative."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.implementation import read_shape
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.checkpoint.formats.quantised import check_tokens, is_linear
from tests.engine.models.checkpoint.formats.test_fp8 import compressed, encode, fp8_channel
from tests.engine.models.checkpoint.formats.test_layouts import Stored, named, rewrite
from tests.engine.models.decoder.llama4.llama4_models import LLAMA4_MODELS, build_llama4_model

SCOUT, MAVERICK, _ = LLAMA4_MODELS


def by_number(name: str, tensor: torch.Tensor) -> Stored:
    """Store each expert's matrices by themselves, and all linear layers in FP8, as llm-compressor does."""
    block, _, matrix = name.rpartition(".")
    if not block.endswith(".experts"):
        return _linear(name, tensor)
    parts = ("gate_proj", "up_proj") if "gate_up" in matrix else ("down_proj",)
    coded, values = {}, []
    for expert, weights in enumerate(tensor):
        encoded = [fp8_channel("", weight.T.contiguous()) for weight in weights.chunk(len(parts), dim=1)]
        for part, each in zip(parts, encoded, strict=True):
            coded |= named(f"{block}.{expert}.{part}", each)
        values.append(torch.cat([each.values.T for each in encoded], dim=1))
    return coded, torch.stack(values)


def in_stacks(name: str, tensor: torch.Tensor) -> Stored:
    """Store the experts of a layer in FP8, with a scale for each output, as FBGEMM does."""
    if not name.rpartition(".")[0].endswith(".experts"):
        return _linear(name, tensor)
    scales = tensor.abs().amax(dim=1, keepdim=True) / 448
    codes, values = zip(*(encode(*expert, (10**6, 1)) for expert in zip(tensor, scales, strict=True)), strict=True)
    codes = torch.stack([each.view(torch.uint8) for each in codes]).view(codes[0].dtype)
    return {name: codes, f"{name}_scale": scales}, torch.stack(values)


def _linear(name: str, tensor: torch.Tensor) -> Stored:
    if not is_linear(name):
        return None
    encoded = fp8_channel("", tensor)
    return named(name.removesuffix(".weight"), encoded), encoded.values


LAYOUTS: dict[str, tuple[Callable[[str, torch.Tensor], Stored], dict[str, Any]]] = {
    "llm-compressor": (by_number, compressed(strategy="channel")),
    "FBGEMM": (in_stacks, {"quantization_config": {"quant_method": "fbgemm_fp8"}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_the_dequantised_checkpoint(layout: str, tmp_path: Path) -> None:
    check_tokens(rewrite(build_llama4_model(MAVERICK), tmp_path, *LAYOUTS[layout]))


def test_a_dense_relative_is_served(tmp_path: Path) -> None:
    """As MobileLLM-R1 is published: without experts, chunks and factors of queries."""
    dense = {"moe_layers": [], "interleave_moe_layer_step": 0, "num_local_experts": 0, "attn_temperature_tuning": False}
    dense |= {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1] * 4, "tie_word_embeddings": True}
    model = build_llama4_model(SCOUT, **dense)
    path = save_checkpoint(model, tmp_path)
    assert read_shape(load_hf_config(path), "auto").max_position_embeddings == 1024
    expected = greedy_answers.oracle(model, greedy_answers.make_prompts())
    greedy_answers.check(path, (4, 7, True, 0.0), expected, model_impl="auto")

"""Tiny quantised checkpoints whose linear layers and experts stay codes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats import test_mlx as of_mlx
from tests.engine.models.checkpoint.formats.quantised import is_linear, save_quantised, tiny_model
from tests.gpu_rehearsal.scenarios import VOCAB_SIZE

__all__ = ["SAVE"]

SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 512}  # some layers divide their sums
SAVE: dict[str, Callable[[Path], Path]] = {
    "gptq": lambda path: of_gptq_awq.save("gptq", path, **SIZES).path,
    # Biases, and a gate whose format is not that of its up.
    "auto-round": lambda path: of_gptq_awq.save("auto-round as gptq", path, family="qwen2", **SIZES).path,
    "fp8": lambda path: of_fp8.save("modelopt blocks", path, **SIZES).path,  # whose activations are not quantised
    "fp8 of activations": lambda path: of_fp8.save("block", path, **SIZES).path,
    "nvfp4": lambda path: of_fp4.save("modelopt", path, **SIZES).path,
    "mlx": lambda path: of_mlx.save(4, path, **SIZES).path,
    "qwen3-moe": lambda path: of_gptq_awq.save("gptq", path, family="qwen3_moe", **SIZES).path,
    "mixed-moe": lambda path: save_mixed_experts(path),
    "fp8-moe": lambda path: of_fp8.save("block", path, "qwen3_moe", **SIZES).path,
    "nvfp4-moe": lambda path: of_fp4.save("modelopt", path, family="qwen3_moe", moe_intermediate_size=64, **SIZES).path,
    "mlx-moe": lambda path: of_mlx.save(4, path, "qwen3_moe", moe_intermediate_size=64, **SIZES).path,
    "mxfp4-moe": lambda path: of_fp4.save("mxfp4", path, family="qwen3_moe", moe_intermediate_size=64, **SIZES).path,
    "gptq-head": lambda path: save_with_head(path),
    "mlx-tied": lambda path: of_mlx.save(4, path, tie_word_embeddings=True, **SIZES).path,  # the embedding is quantised
}


def save_mixed_experts(path: Path) -> Path:
    """Save a model whose first expert's ups have more bits than its gates, and than the other experts'."""
    ups = [f"model.layers.{layer}.mlp.experts.0.up_proj" for layer in range(3)]
    config = of_gptq_awq.AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}
    config |= {"extra_config": {name: {"bits": 8} for name in ups}}
    return save_quantised(
        tiny_model("qwen3_moe", **SIZES),
        path,
        lambda name, weight: of_gptq_awq.gptq(weight, 8 if name in ups else 4, "no g_idx"),
        {"quantization_config": config},
    ).path


def save_with_head(path: Path) -> Path:
    """Save a model whose head is quantised, too."""
    return save_quantised(
        tiny_model(intermediate_size=224, **SIZES),
        path,
        lambda name, weight: of_gptq_awq.gptq(weight, 4, ""),
        {"quantization_config": of_gptq_awq.gptq_config(4, desc_act=False)},
        chosen=lambda name: is_linear(name) or name == "lm_head.weight",
    ).path

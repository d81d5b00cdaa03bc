"""Quantised experts of a multimodal checkpoint that are stored as [num_experts, inputs, outputs], with their scales."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import Shard
from engine.sampling_params import SamplingParams
from tests.engine.models.adapter.greedy_answers import MAX_TOKENS, make_prompts, oracle
from tests.engine.models.checkpoint.formats.test_fp8 import block_maxima, encode
from tests.engine.models.multimodal.tiny_checkpoints import Saved, save
from tests.engine.oracle import answers, make_llm, run

BLOCK = (16, 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and values of stacked matrices."""
    parts = [(*encode(matrix, scales := block_maxima(matrix, BLOCK), BLOCK), scales) for matrix in weight]
    codes, values, scales = (torch.stack(list(part)) for part in zip(*parts, strict=True))
    return codes, scales, values


def rewrite(saved: Saved, path: Path, tensors: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> Saved:
    """Write a checkpoint with other tensors into one file, and give the model their values."""
    path.mkdir()
    save_file({name: weight.contiguous().clone() for name, weight in tensors.items()}, path / "model.safetensors")
    with torch.no_grad():
        for name, value in values.items():
            saved.model.get_parameter(name).copy_(value)
    return Saved(path, saved.model)


def test_blocks_of_experts_that_are_turned(tmp_path: Path) -> None:
    """The scales lie as the weights do, [num_experts, inputs, outputs] divided by the block."""
    saved = save("qwen3-vl-moe", tmp_path / "plain")
    tensors, values = {}, {}
    for name, weight in saved.weights.items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        tensors[name], tensors[f"{name}_scale_inv"], dequantised = in_blocks(weight)
        values[name] = dequantised.mT
    quantised = rewrite(saved, tmp_path / "fp8", tensors, values)
    raw = json.loads((saved.path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (quantised.path / "config.json").write_text(json.dumps(raw))
    with open_checkpoint(quantised.path) as checkpoint:
        for name, expected in values.items():
            own = name.replace("model.language_model.", "model.")
            assert torch.equal(checkpoint.read(own), expected)
            rows, columns = expected.shape[1:]
            for shard in (Shard(0, rows, 3, rows - 5, 4, 2), Shard(1, columns, 7, columns - 3, 4, 1)):
                want = expected[shard.index].narrow(shard.dim, shard.start, shard.stop - shard.start)
                assert torch.equal(checkpoint.read(own, shard), want)
    expected = oracle(quantised.model, make_prompts())
    for model_impl in ("auto", "transformers"):
        llm = make_llm(str(quantised.path), num_blocks=32, model_impl=model_impl)
        assert answers(run(llm, make_prompts(), GREEDY)) == expected

"""Loading takes at most the memory of the weights and of one shard; of two, if the weights are dequantised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kernels.cpu.library import library
from tests.engine.checkpoints import build_model, save_checkpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's record of the peak")

MIB = 2**20
SHAPE: dict[str, Any] = {
    "vocab_size": 40_000,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "tie_word_embeddings": False}
SCRIPT = """
import sys
from pathlib import Path

import torch

from engine.models.config.transformers_config import TransformersConfig
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

def load(path, dtype):
    config = load_hf_config(path)
    if sys.argv[3] == "transformers":
        shape = TransformersConfig.from_hf(config)
        return load_transformers_decoder(path, shape, dtype=dtype, device=torch.device("cpu"),
                                         parallel=TensorParallel())
    return load_decoder(path, config, dtype=dtype, device=torch.device("cpu"), max_model_len=64,
                        parallel=TensorParallel())

load(sys.argv[1], torch.bfloat16)  # what loading itself needs: modules, threads, the compiled library
Path("/proc/self/clear_refs").write_text("5")  # the peak is recorded anew
before = status("VmRSS")
model = load(sys.argv[2], torch.bfloat16)
print(status("VmHWM") - before, status("VmRSS") - before, type(model).__name__)
"""


def save_zeros(config: PreTrainedConfig, path: Path) -> None:
    """Save a model whose weights are zeros, which are written faster than random numbers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    save_checkpoint(model, path, max_shard_size="90MB")


def quantise(path: Path) -> None:
    """Store the linear layers of a checkpoint of zeros in FP8."""
    names = {}
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones([-(-size // 128) for size in tensors[name].shape])
        save_file(tensors, file, {"format": "pt"})
        names |= dict.fromkeys(tensors, file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


@pytest.mark.parametrize(
    ("model_impl", "kind"),
    [
        pytest.param("pagoda", "CpuDecoder", marks=pytest.mark.exhaustive("CI loads by the other implementation")),
        pytest.param("transformers", "TransformersDecoder", marks=pytest.mark.long),
    ],
)
def test_the_peak_of_dequantised_weights_is_at_most_two_shards_more(model_impl: str, kind: str, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    small = save_checkpoint(build_model("qwen3"), tmp_path / "small")
    save_zeros(AutoConfig.for_model("qwen3", **SHAPE | {"tie_word_embeddings": False}), tmp_path / "large")
    in_memory = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    quantise(tmp_path / "large")
    largest = max(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))

    command = [sys.executable, "-c", SCRIPT, small, str(tmp_path / "large"), model_impl]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, after, loaded = run.stdout.split()
    assert loaded == kind
    assert int(peak) <= in_memory + 2 * largest
    assert int(after) <= in_memory + 48 * MIB


FURTHER = pytest.mark.exhaustive("a further model; CI loads tied weights and experts")


@pytest.mark.parametrize(
    ("family", "options", "model_impl", "kind"),
    [
        pytest.param("qwen3", {"tie_word_embeddings": True}, "pagoda", "CpuDecoder", marks=pytest.mark.long),
        pytest.param("qwen3", {"tie_word_embeddings": False}, "pagoda", "CpuDecoder", marks=FURTHER),
        pytest.param("qwen3_moe", EXPERTS, "pagoda", "CpuDecoder", marks=pytest.mark.long),
        pytest.param("qwen3", {"tie_word_embeddings": False}, "transformers", "TransformersDecoder", marks=FURTHER),
        pytest.param("qwen3_moe", EXPERTS, "transformers", "TransformersDecoder", marks=FURTHER),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "tied" if value["tie_word_embeddings"] else "untied",
)
def test_the_peak_is_at_most_the_weights_and_one_shard(
    family: str, options: dict[str, Any], model_impl: str, kind: str, tmp_path: Path
) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    small = save_checkpoint(build_model(family), tmp_path / "small")
    save_zeros(AutoConfig.for_model(family, **SHAPE | options), tmp_path / "large")
    sizes = [file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors")]
    assert len(sizes) >= 2

    command = [sys.executable, "-c", SCRIPT, small, str(tmp_path / "large"), model_impl]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, after, loaded = run.stdout.split()
    assert loaded == kind
    assert int(peak) <= sum(sizes) + max(sizes)
    assert int(after) <= sum(sizes) + 48 * MIB  # nothing is held twice; the embedding has 59 MiB

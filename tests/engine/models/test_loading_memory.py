"""Loading takes at most the memory of the weights and of one shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kernels.cpu.library import library
from tests.engine.conftest import SavedModel

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's record of the peak")

MIB = 2**20
SHAPE: dict[str, Any] = {
    "vocab_size": 40_000,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
DENSE = SHAPE | {"intermediate_size": 3072, "num_hidden_layers": 10}
SPARSE = SHAPE | {
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "intermediate_size": 3072,
    "mlp_only_layers": [1],
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tied": (Qwen3Config, Qwen3ForCausalLM, DENSE),
    "untied": (Qwen3Config, Qwen3ForCausalLM, DENSE | {"tie_word_embeddings": False}),
    "experts": (Qwen3MoeConfig, Qwen3MoeForCausalLM, SPARSE),
}
SCRIPT = """
import sys
from pathlib import Path

import torch

from engine.models.config import load_hf_config
from engine.models.loader import load_decoder
from engine.models.tensor_parallel import TensorParallel

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

def load(path, dtype):
    return load_decoder(path, load_hf_config(path), dtype=dtype, device=torch.device("cpu"), max_model_len=64,
                        parallel=TensorParallel())

load(sys.argv[1], torch.bfloat16)  # what loading itself needs: modules, threads, the compiled library
Path("/proc/self/clear_refs").write_text("5")  # the peak is recorded anew
before = status("VmRSS")
model = load(sys.argv[2], torch.bfloat16)
print(status("VmHWM") - before, status("VmRSS") - before, type(model).__name__)
"""


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_at_most_the_weights_and_one_shard(name: str, qwen3: SavedModel, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    config_class, model_class, shape = MODELS[name]
    config = config_class(**shape, architectures=[model_class.__name__])
    model = model_class._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="90MB", save_original_format=False)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) >= 2

    command = [sys.executable, "-c", SCRIPT, qwen3.path, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, after, kind = run.stdout.split()
    assert kind == "CpuDecoder"
    assert int(peak) <= sum(sizes) + max(sizes)
    assert int(after) <= sum(sizes) + 24 * MIB  # nothing is held twice

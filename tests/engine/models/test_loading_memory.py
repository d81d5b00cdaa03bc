"""Loading takes at most the memory of the weights and of one shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

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
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
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


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_peak_is_at_most_the_weights_and_one_shard(*, is_tied: bool, qwen3: SavedModel, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    config = Qwen3Config(**SHAPE, tie_word_embeddings=is_tied, architectures=["Qwen3ForCausalLM"])
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="90MB", save_original_format=False)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) >= 2

    command = [sys.executable, "-c", SCRIPT, qwen3.path, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, after, kind = run.stdout.split()
    assert kind == "CpuDecoder"
    assert int(peak) <= sum(sizes) + max(sizes)
    assert int(after) <= sum(sizes) + 48 * MIB  # nothing is held twice; the embedding has 59 MiB

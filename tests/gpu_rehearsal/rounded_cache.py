"""What engines with keys and values in FP8 are compared with: a CPU's engine in torch, whose cache is rounded alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from kernels.attention.cpu_backend import CpuBackend
from kernels.cache.fp8 import from_fp8, to_fp8
from kernels.cache.store_kvcache import store_kvcache
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, OPTIONS, VOCAB_SIZE, Scenario, generate

__all__ = [
    "KEY_SCALE",
    "VALUE_SCALE",
    "forced_logprobs",
    "rounded",
    "rounded_answers",
    "texts",
    "with_scales",
]

KEY_SCALE, VALUE_SCALE = 0.03, 2.7  # neither is a power of two, so they change what numbers are rounded to


def forced_logprobs(llm: LLM, token_ids: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of each given token but the first of each text, in one row."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in token_ids], params, use_tqdm=False)
    items = [item for output in outputs for item in output.prompt_logprobs or () if item]
    return torch.tensor([next(iter(item.values())).logprob for item in items])


def texts() -> list[list[int]]:
    """Return random token ids, whose log-probabilities show every change of a cache."""
    rng = random.Random(5)
    return [[rng.randrange(10, VOCAB_SIZE) for _ in range(length)] for length in (150, 60, 17, 120)]


@contextmanager
def rounded(monkeypatch: pytest.MonkeyPatch, key_scale: float = 1.0, value_scale: float = 1.0) -> Iterator[None]:
    """Round keys and values to FP8 and back as a CPU's engine in torch stores them."""

    def store(key: torch.Tensor, value: torch.Tensor, *cache: Any) -> None:
        scaled = [(key, key_scale), (value, value_scale)]
        numbers = [from_fp8(to_fp8(numbers, scale), scale) for numbers, scale in scaled]
        store_kvcache(*numbers, *cache[:3])

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "uses_cpu_kernels", False)  # torch's operators call the function that is replaced
        patch.setattr("kernels.layer_ops.torch.store_kvcache", store)
        yield


def rounded_answers(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    scenario: Scenario,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    **options: Any,
) -> Any:
    """Return the outputs of an engine in float32 whose keys and values are rounded to FP8 and back as they are stored.

    Request them before a fixture simulates a GPU: they must not see it.
    """

    with rounded(monkeypatch, key_scale, value_scale):
        options = {**OPTIONS, **scenario.options, "device": "cpu", "tensor_parallel_size": 1, **options}
        return generate(LLM(path, **options), scenario)


def with_scales(directory: Path) -> str:
    """Save the demo model with scales of keys and values, as compressed-tensors names them."""
    for file in Path(DEMO_MODEL).iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(DEMO_MODEL) / "model.safetensors")
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(KEY_SCALE)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([VALUE_SCALE])
    save_file(tensors, directory / "model.safetensors")
    return str(directory)

"""CpuDecoder against Decoder, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv.kv_cache import KVCache
from engine.kv.layer_cache import without_windows
from engine.kv.pool_sizes import PoolSizes
from engine.models.config.files.hf_config import load_hf_config
from engine.models.decoder import loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.forward_context import ForwardContext
from engine.models.tensor_parallel import TensorParallel
from kernels.attention.select import select_backend
from kernels.attention_metadata import AttentionMetadata, leading_decodes
from kernels.cpu.library import library, set_num_threads
from kernels.cpu.linear import has_int8
from tests.engine.checkpoints import EXPERT_FAMILIES, FAMILIES, build_model, save_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 4
# Relative to the largest logit. bfloat16: torch rounds after every operator, the kernels only inputs of linear layers
# and attention. int8: an element between two steps may be rounded to either, and later layers see the difference.
TOLERANCES = {(torch.float32, None): 1e-5, (torch.bfloat16, None): 5e-2, (torch.float32, "int8"): 3e-2}


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    set_num_threads(request.param)
    yield request.param
    set_num_threads(torch.get_num_threads())


def load(path: str, kind: type[Any], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quantization: Any) -> Any:
    with monkeypatch.context() as patched:
        if kind is Decoder:
            patched.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
        model = loader.load_decoder(
            path,
            load_hf_config(path),
            dtype=dtype,
            device=CPU,
            max_model_len=256,
            parallel=TensorParallel(),
            quantization=quantization,
        )
    assert isinstance(model, kind)
    return model


def logits_of_two_steps(model: Any, dtype: torch.dtype) -> torch.Tensor:
    """Compute a prefill of two sequences, then a step that continues both and starts a third one."""
    cache = KVCache(
        without_windows(model.layer_caches),
        PoolSizes(64),
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=CPU,
    )
    backend = select_backend(CPU, dtype)
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:60].view(3, 20).int()

    def step(parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """``parts``: sequence, first position, tokens."""
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
        sequences = torch.cat([torch.full((count,), which) for which, _, count in parts])
        slots = tables[sequences, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        counts = torch.tensor([0, *(count for _, _, count in parts)])
        metadata = AttentionMetadata(
            slot_mapping=slots,
            cu_seqlens_q=counts.cumsum(0).int(),
            seq_lens=torch.tensor([start + count for _, start, count in parts]).int(),
            block_tables=tables[[which for which, _, _ in parts]].contiguous(),
            num_decodes=leading_decodes(count for _, _, count in parts),
            max_query_len=max(count for _, _, count in parts),
            max_seq_len=max(start + count for _, start, count in parts),
        )
        token_ids = (positions * 7 + sequences * 31) % model.config.vocab_size
        hidden = model(token_ids, positions, ForwardContext(backend, metadata, cache))
        logits = model.compute_logits(hidden, torch.arange(len(hidden)).flip(0))  # any tokens, in any order
        assert logits is not None
        return logits.clone()

    with torch.inference_mode():
        return torch.cat((step([(0, 0, 9), (1, 0, 60)]), step([(0, 9, 1), (1, 60, 7), (2, 0, 5)])))


@pytest.mark.parametrize(("dtype", "quantization"), TOLERANCES)
@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_equals_torch(
    family: str,
    dtype: torch.dtype,
    quantization: str | None,
    num_threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if quantization == "int8" and not has_int8():
        pytest.skip("the processor has no instruction for int8")
    # Of experts, all compute every token here, or the last bits could choose others; torch does not quantize them.
    num_experts = {"qwen3_moe": 8, "qwen2_moe": 6, "mixtral": 4}.get(family)
    if num_experts is not None and quantization == "int8":
        pytest.skip("tests/kernels/cpu/test_experts.py compares quantized experts")
    changes = {} if num_experts is None else {"num_experts_per_tok": num_experts, "num_hidden_layers": 2}
    path = save_checkpoint(build_model(family, **changes), tmp_path)
    expected = logits_of_two_steps(load(path, Decoder, monkeypatch, dtype, quantization), dtype)
    got = logits_of_two_steps(load(path, CpuDecoder, monkeypatch, dtype, quantization), dtype)
    difference = (got - expected).abs().max() / expected.abs().max()
    assert difference <= TOLERANCES[dtype, quantization]


def test_torch_computes_float16_and_odd_heads(tmp_path: Path) -> None:
    path = save_checkpoint(build_model("llama", head_dim=8), tmp_path)
    for dtype in (torch.float16, torch.float32):
        model = loader.load_decoder(
            path, load_hf_config(path), dtype=dtype, device=CPU, max_model_len=256, parallel=TensorParallel()
        )
        assert isinstance(model, Decoder)


def test_packed_weights_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding stays mapped; packed weights are as large as the checkpoint's linear layers, and padding."""
    path = save_checkpoint(build_model("qwen3", torch_dtype=torch.bfloat16), tmp_path)
    model = load(path, CpuDecoder, monkeypatch, torch.bfloat16, None)
    stored = load(path, Decoder, monkeypatch, torch.bfloat16, None).num_bytes
    assert stored * 0.9 < model.num_bytes < stored * 1.4

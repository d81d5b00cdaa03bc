"""After the warm-up no step waits for a Triton compilation: whatever it launches was launched before.

The engine runs on the CPU with the Triton backend of a GPU with 132 multiprocessors, and kernels are recorded instead
of run (LaunchLog).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.llm import LLM
from engine.models.decoder import loader
from engine.sampling_params import SamplingParams
from engine.worker.model_shard import ModelShard
from kernels.layer_ops.torch import TorchOps
from tests.engine.checkpoints import build_model, save_checkpoint

if TYPE_CHECKING:
    from tests.kernels.launch_log import LaunchLog

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "QK norm, groups of 3": ("qwen3", {}),
    "one KV head, as on a rank of many": ("qwen3", {"num_key_value_heads": 1}),
    "windows of 1500 tokens in half the layers": ("qwen2", {"sliding_window": 1500}),
    "windows of 40 tokens": ("mistral", {}),
    "an odd head dimension": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 22}),
}
SMALL = {"hidden_size": 48, "intermediate_size": 8, "max_position_embeddings": 20000}  # few multiplications a token


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LaunchLog:
    pytest.importorskip("triton")  # imported here, not by collecting tests: see tests/kernels/conftest.py
    from kernels.layer_ops.triton.ops import TritonOps
    from tests.kernels.launch_log import LaunchLog

    backend = "kernels.attention.triton.backend"
    monkeypatch.setattr(f"{backend}.TritonBackend.why_unusable", lambda device: None)
    monkeypatch.setattr(f"{backend}._num_multiprocessors", lambda device: 132)

    class LoggedOps(TorchOps):
        """Computes with torch, since kernels are not run, and launches the kernels for the log."""

        def add_norm(self, *args: Any) -> Any:
            TritonOps().add_norm(*args)
            return super().add_norm(*args)

        def rotate_and_store(self, *args: Any) -> Any:
            TritonOps().rotate_and_store(*args)
            return super().rotate_and_store(*args)

        def gated_activation(self, *args: Any) -> Any:
            TritonOps().gated_activation(*args)
            return super().gated_activation(*args)

    monkeypatch.setattr(loader, "select_layer_ops", lambda device: LoggedOps())
    return LaunchLog(monkeypatch)


def start(path: str, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"max_num_batched_tokens": 4096, "max_num_seqs": 40, "kv_cache_memory": "256MiB"}
    return LLM(
        path,
        device="cpu",
        dtype="bfloat16",
        attention_backend="triton",
        skip_tokenizer_init=True,
        max_decode_slowdown=None,
        **(defaults | options),
    )


def run_steps_of_every_kind(llm: LLM) -> None:
    """Prefills, whole and in chunks, beside decodes; decodes alone, one to 40, after contexts of every length."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    lengths = [[1], [2], [3, 1], [9, 17], [33, 65, 1], [130] * 8, [260] * 40, [530] * 3, [1100] * 5, [2100, 50]]
    lengths += [[4200], [4200, 600, 600], [8300], [16500], [16500, 3000]]
    for batch in lengths:
        prompts: Any = [{"prompt_token_ids": [3 + index % 300] * length} for index, length in enumerate(batch)]
        llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS.keys())
def test_no_step_compiles_a_kernel(family: str, changes: dict[str, Any], tmp_path: Path, log: LaunchLog) -> None:
    path = save_checkpoint(build_model(family, **(SMALL | changes)), tmp_path)
    llm = start(path)
    warmed = list(log.variants)
    run_steps_of_every_kind(llm)
    assert list(log.variants)[len(warmed) :] == []


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"num_blocks": 3000},
        {"max_num_batched_tokens": 5, "max_num_seqs": 5, "max_model_len": 600},
    ],
    ids=["drafts", "a configured number of blocks", "small steps"],
)
def test_options_change_nothing(options: dict[str, Any], tmp_path: Path, log: LaunchLog) -> None:
    llm = start(save_checkpoint(build_model("qwen3", **SMALL), tmp_path), **options)
    warmed = list(log.variants)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for batch in ([1], [7, 1, 3], [300], [590], [590, 300]):
        prompts: Any = [{"prompt_token_ids": [5, 6, 7, 8] * (length // 4) + [9] * (length % 4)} for length in batch]
        llm.generate(prompts, params, use_tqdm=False)
    assert list(log.variants)[len(warmed) :] == []


def test_without_the_warm_up_steps_compile(tmp_path: Path, log: LaunchLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the log is for: steps launch more variants than the largest step alone."""
    monkeypatch.setattr(ModelShard, "warm_up_batches", lambda self: [(2048, 2048)])
    llm = start(save_checkpoint(build_model("qwen3", **SMALL), tmp_path))
    warmed = list(log.variants)
    run_steps_of_every_kind(llm)
    compiled_late = [variant.split("(")[0] for variant in list(log.variants)[len(warmed) :]]
    assert {name: compiled_late.count(name) for name in set(compiled_late)} == {
        "plan_splits_kernel": 1,
        "split_decode_kernel": 1,
        "reduce_splits_kernel": 1,
    }


def test_a_cpu_warms_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(build_model("qwen3"), tmp_path)
    computed: list[torch.Tensor] = []
    monkeypatch.setattr(ModelShard, "forward", lambda self, step, cache: computed.append(step.token_ids))
    LLM(path, device="cpu", skip_tokenizer_init=True, kv_cache_memory="1MiB")
    assert computed == []

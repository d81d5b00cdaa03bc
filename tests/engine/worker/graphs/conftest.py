"""Engines on the CPU that capture and replay their decodes as a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.llm import LLM
from engine.models.decoder import loader
from engine.worker import model_shard, step_graphs
from engine.worker.step_graphs import StepGraphs
from kernels.layer_ops import torch as torch_ops
from tests.engine.conftest import SavedModel
from tests.engine.worker.graphs.recorded_graphs import RecordingDevice
from tests.engine.worker.graphs.torch_attention import TorchAttention, store_kvcache
from tests.engine.worker.graphs.torch_recurrence import TorchRecurrence

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_blocks": 60,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_seqs": 11,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    """What captures the graphs of the engines that a test starts."""
    recording = RecordingDevice()
    monkeypatch.setattr(torch_ops, "store_kvcache", store_kvcache)
    monkeypatch.setattr(model_shard, "select_backend", lambda *_: TorchAttention())
    monkeypatch.setattr(
        loader, "select_recurrent_ops", lambda *_, **__: TorchRecurrence(lambda: recording.is_capturing)
    )
    monkeypatch.setattr(step_graphs, "CudaGraphDevice", lambda _: recording)
    monkeypatch.setattr(StepGraphs, "are_used", True)
    return recording


@pytest.fixture
def start(device: RecordingDevice, family: SavedModel) -> Callable[..., LLM]:
    """Starts an engine of each family in turn."""
    return lambda **options: LLM(family.path, **(OPTIONS | options))

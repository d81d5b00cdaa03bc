"""int8 weights through the whole engine, with the C kernels and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.llm import LLM
from engine.models.decoder import loader
from engine.sampling_params import SamplingParams
from engine.worker import model_shard
from engine.worker.model_shard import ModelShard
from kernels.cpu.library import library
from kernels.linear.registry import LINEAR_METHODS

DEMO_MODEL = Path(__file__).parents[4] / "demo" / "model"
CHAT = [{"role": "user", "content": "What is a block table?"}]


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    elif library() is None:
        pytest.skip("no C compiler is installed")


@pytest.mark.usefixtures("kernels")
def test_int8_answers_like_the_weights_it_was_made_of() -> None:
    answers = []
    for quantization in (None, "int8"):
        llm = LLM(str(DEMO_MODEL), device="cpu", num_blocks=64, quantization=quantization)
        params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0)
        answers.append(llm.chat([CHAT], params, use_tqdm=False)[0].outputs[0])
    plain, quantized = answers
    assert quantized.text == plain.text
    assert quantized.cumulative_logprob != plain.cumulative_logprob
    assert quantized.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=0.5)


@pytest.mark.usefixtures("kernels")
def test_int8_takes_less_memory_than_bfloat16() -> None:
    sizes = []
    for quantization in (None, "int8"):
        llm = LLM(str(DEMO_MODEL), device="cpu", num_blocks=64, quantization=quantization)
        sizes.append(llm.engine.runner.workers.local.shard.weight_bytes)  # type: ignore[attr-defined]
    assert sizes[1] < 0.8 * sizes[0]  # an embedding is not quantized, and no longer the same as the head


@pytest.mark.skipif(library() is None, reason="no C compiler is installed")
def test_int4_answers_like_the_weights_it_was_made_of_in_less_memory() -> None:
    answers, sizes = [], []
    for quantization in (None, "int8", "int4"):
        llm = LLM(str(DEMO_MODEL), device="cpu", num_blocks=64, quantization=quantization)
        params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0)
        answers.append(llm.chat([CHAT], params, use_tqdm=False)[0].outputs[0])
        sizes.append(llm.engine.runner.workers.local.shard.weight_bytes)  # type: ignore[attr-defined]
    plain, _, quantized = answers
    assert quantized.text == plain.text
    assert quantized.cumulative_logprob != plain.cumulative_logprob
    assert quantized.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=0.5)
    assert sizes[2] < 0.75 * sizes[1]


def test_int4_without_the_c_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    with pytest.raises(ConfigError, match="quantization='int4'"):
        LLM(str(DEMO_MODEL), device="cpu", num_blocks=64, quantization="int4")


def test_what_is_not_offered_is_named() -> None:
    with pytest.raises(ConfigError, match="quantization='fp8' is unknown; choose one of int8, int4, dequantize"):
        EngineConfig(model="x", quantization="fp8")
    with pytest.raises(ConfigError, match="max_decode_slowdown=0.5"):
        EngineConfig(model="x", max_decode_slowdown=0.5)
    with pytest.raises(ConfigError, match="num_threads=0"):
        EngineConfig(model="x", num_threads=0)


def test_the_table_of_linear_methods_says_on_which_devices_a_quantization_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shard, "resolve_device", lambda config, rank: torch.device("cuda", 0))
    config = EngineConfig(model=str(DEMO_MODEL), quantization="int8")
    with pytest.raises(ConfigError, match=r"quantization='int8' runs on cpu, and the device is cuda:0; leave it out"):
        ModelShard(config, 0)
    devices = replace(LINEAR_METHODS["torch_int8"], devices=("cpu", "xpu"))
    monkeypatch.setitem(LINEAR_METHODS, "torch_int8", devices)
    with pytest.raises(ConfigError, match="runs on cpu and xpu"):
        ModelShard(config, 0)


def test_a_cpu_measures_how_many_tokens_are_free() -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    llm = LLM(str(DEMO_MODEL), device="cpu", num_blocks=64)
    free = llm.engine.info.free_tokens
    assert free is not None
    assert 1 <= free <= 256

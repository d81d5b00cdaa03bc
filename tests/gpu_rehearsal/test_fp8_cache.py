"""Keys and values in FP8 on a GPU: steps of every kind answer what a CPU answers whose cache is rounded alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.decoder.latent.latent_families import save_latent_model
from tests.gpu_rehearsal.family_models import SCENARIO
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.rounded_cache import KEY_SCALE, VALUE_SCALE, rounded_answers, with_scales
from tests.gpu_rehearsal.scenarios import DEMO_MODEL, SCENARIOS, VOCAB_SIZE, answers, generate

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
NAMES = ["every parameter", "drafts", "swapped", "two ranks"]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the CPU answers."""
    with pytest.MonkeyPatch.context() as patch:
        return {name: answers(rounded_answers(patch, DEMO_MODEL, SCENARIOS[name])) for name in NAMES}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in NAMES if name != "swapped"),
        pytest.param("swapped", marks=pytest.mark.exhaustive("swaps copy bytes of any dtype")),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"async_scheduling": True}, marks=pytest.mark.exhaustive("CI runs one step at a time")),
        pytest.param({"enforce_eager": True}, marks=pytest.mark.exhaustive("graphs have the same kernels in CI")),
    ],
    ids=str,
)
def test_a_scenario(name: str, options: dict[str, Any], expected: dict[str, Any], gpu: Rehearsal) -> None:
    scenario = SCENARIOS[name]
    if options.get("async_scheduling") and name == "two ranks":
        pytest.skip("ranks do not overlap steps")
    gpu.machine.max_waits = 2
    llm = gpu.start(**scenario.options, **FP8, **options)
    for _ in range(2):  # the second time much comes from the prefix cache
        assert answers(generate(llm, scenario)) == expected[name]
    gpu.machine.check()


def test_rounding_changes_answers(cpu_answers: dict[str, object], expected: dict[str, Any]) -> None:
    """Else the other tests would not see whether a cache is in FP8."""
    assert expected["every parameter"] != cpu_answers["every parameter"]


@pytest.fixture
def with_scales_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    path = with_scales(tmp_path)
    outputs = rounded_answers(monkeypatch, path, SCENARIOS["one at a time"], KEY_SCALE, VALUE_SCALE)
    return path, answers(outputs)


def test_the_checkpoints_scales(with_scales_expected: tuple[str, Any], gpu: Rehearsal) -> None:
    (path, expected), scenario = with_scales_expected, SCENARIOS["one at a time"]
    assert answers(generate(gpu.start(path, **scenario.options, **FP8), scenario)) == expected
    assert answers(generate(gpu.start(**scenario.options, **FP8), scenario)) != expected


@pytest.fixture(params=["mistral", "qwen2"])
def windowed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """A model with a window in all layers, and one with a window in one layer; and the CPU's answers."""
    path = save_checkpoint(build_model(request.param, vocab_size=VOCAB_SIZE), tmp_path)
    return path, answers(rounded_answers(monkeypatch, path, SCENARIO, skip_tokenizer_init=True))


def test_windows(windowed: tuple[str, Any], gpu: Rehearsal) -> None:
    path, expected = windowed
    llm = gpu.start(path, **FP8, skip_tokenizer_init=True)
    assert answers(generate(llm, SCENARIO)) == expected
    gpu.machine.check()


def test_the_cache_holds_as_many_more_tokens(gpu: Rehearsal, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    num_blocks = {}
    for dtype in ("auto", "fp8", "fp8_e4m3"):
        llm = gpu.start(kv_cache_dtype=dtype, num_blocks=None, kv_cache_memory="1MiB")
        num_blocks[dtype] = llm.engine.info.num_blocks
        assert llm.engine.info.kv_cache_dtype == dtype.partition("_")[0]
    assert num_blocks["fp8"] == num_blocks["fp8_e4m3"]
    assert num_blocks["fp8"] // 4 == num_blocks["auto"]  # of float32
    assert re.search(r"GPU KV cache size: [\d,]+ tokens in float32, ", caplog.text)
    assert re.search(r"GPU KV cache size: [\d,]+ tokens in fp8, ", caplog.text)


@pytest.fixture
def adapted(tmp_path: Path) -> str:
    return save_checkpoint(build_model("qwen3", vocab_size=VOCAB_SIZE), tmp_path)


def test_transformers_modules_answer_as_our_own_decoder(adapted: str, gpu: Rehearsal) -> None:
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # as in test_adapter.py
    by_implementation = [
        answers(generate(gpu.start(adapted, **FP8, model_impl=name, skip_tokenizer_init=True), SCENARIO))
        for name in ("pagoda", "transformers")
    ]
    torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
    gpu.machine.check()
    assert by_implementation[0] == by_implementation[1]


@pytest.fixture
def with_latents(tmp_path: Path) -> str:
    return save_latent_model("deepseek-v3", tmp_path)[1]


def test_latents_are_refused(with_latents: str, gpu: Rehearsal) -> None:
    problem = "kv_cache_dtype='fp8' is for keys and values, and DeepseekV3ForCausalLM caches latents; leave it out"
    with pytest.raises(ConfigError, match=problem):
        gpu.start(with_latents, **FP8, skip_tokenizer_init=True)


def test_flash_attn_is_refused_and_not_chosen(gpu_with_flash_attn: Rehearsal) -> None:
    options = FP8 | {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="'flash_attn' cannot run .* does not compute fp8, .*; use auto or triton"):
        gpu_with_flash_attn.start(**options, attention_backend="flash_attn")
    assert gpu_with_flash_attn.start(**options).engine.info.attention_backend == "triton"

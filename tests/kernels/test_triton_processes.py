"""Tests in a Python process of their own: Triton decides once a process whether it interprets or compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.timeout(600)  # a table of variants takes two minutes of a core
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a program, by compute capability
ATTENTION = {"prefill_kernel", "plan_splits_kernel", "split_decode_kernel", "reduce_splits_kernel"}
VOCAB_SIZES = ("128256", "262144", "151936", "50257")  # of Llama 3, Gemma 3, Qwen3 and GPT-2, which is odd
TWO_TILES = 2 * 2 * 32 * 128 * 2  # bytes of keys and values of head_dim 128: one is loaded while one is used


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


def test_nothing_on_the_cpu_path_imports_triton_or_flash_attn() -> None:
    script = (
        "import sys, torch, kernels, kernels.cache.reference; from kernels.attention.select import select_backend; "
        "import kernels.attention.flash.flash_attn, kernels.attention.flash.flash_attn_3, kernels.attention.reference; "
        "select_backend(torch.device('cpu'), torch.float32); "
        "print([name for name in ('triton', 'flash_attn', 'flash_attn_interface') if name in sys.modules])"
    )
    result = _python("-c", script)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.fixture(
    params=[
        pytest.param([90], id="sm_90", marks=pytest.mark.long),
        pytest.param(
            [80, 90, 100],
            id="sm_80, sm_90 and sm_100",
            marks=pytest.mark.exhaustive("the whole tables for three architectures; CI compiles a part for sm_90"),
        ),
    ]
)
def capabilities(request: pytest.FixtureRequest) -> list[int]:
    """Return the compute capabilities to compile for. A single one is for CI, which compiles a part of the tables."""
    return list(request.param)


def _compile(cache: Path, capabilities: list[int], *arguments: str, shared_by_decodes: int = 0) -> list[Counter[str]]:
    """Compile in another process, check what each variant takes, and return the kernels' variants for each GPU."""
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    listed = ",".join(map(str, capabilities))
    result = _python("-m", "tests.kernels.compile_for_gpu", listed, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    compiled: dict[int, Counter[str]] = {capability: Counter() for capability in capabilities}
    for line in result.stdout.splitlines():
        capability, name, registers, stack, shared = line.split()
        assert 0 < int(registers) <= 255, line
        assert int(stack) == 0, f"registers are spilled: {line}"
        assert int(shared) <= SHARED_MEMORY[int(capability)], line
        assert name != "split_decode_kernel" or int(shared) > shared_by_decodes, f"not double-buffered: {line}"
        compiled[int(capability)][name] += 1
    return list(compiled.values())


def test_every_kernel_of_a_decoder_layer_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    names = {"add_norm_kernel", "rotate_and_store_kernel", "gated_activation_kernel", "linear_kernel"}
    part = ["few"] if len(capabilities) == 1 else []
    for compiled in _compile(tmp_path, capabilities, "variants", *part, "layers", "linear"):
        assert set(compiled) == names
        assert compiled["rotate_and_store_kernel"] >= 11


def test_linear_layers_on_codes_compile_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part = ["few"] if len(capabilities) == 1 else []
    for compiled in _compile(tmp_path, capabilities, "variants", *part, "coded"):
        assert set(compiled) == {"coded_linear_kernel", "add_parts_kernel", "decode_kernel"}


@pytest.mark.exhaustive(
    "half a minute of compilation; CI compiles the linear layers on codes, which share the decoding"
)
def test_experts_on_codes_compile_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part = ["few"] if len(capabilities) == 1 else []
    for compiled in _compile(tmp_path, capabilities, "variants", *part, "coded_experts"):
        assert set(compiled) == {"route_kernel", "group_kernel", "grouped_coded_linear_kernel", "combine_kernel"}


def test_every_kernel_of_a_recurrent_layer_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part = ["few"] if len(capabilities) == 1 else []
    names = {
        *("conv_sequence_kernel", "conv_other_tokens_kernel", "delta_rule_kernel", "scan_kernel"),
        *("delta_rule_chunks_kernel", "scan_chunks_kernel", "carry_states_kernel"),
    }
    of_some = {"row_decays_chunks_kernel"}  # one model's, which has no chunks in float32
    compiled = [set(of_one) for of_one in _compile(tmp_path, capabilities, "variants", *part, "recurrent")]
    assert set().union(*compiled) == names | of_some
    assert all(of_one >= names for of_one in compiled)


def test_sparse_latent_attention_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part = ["few"] if len(capabilities) == 1 else []
    for compiled in _compile(tmp_path, capabilities, "variants", *part, "sparse"):
        assert set(compiled) == {"index_scores_kernel", "choose_kernel", "sparse_kernel"}


@pytest.mark.exhaustive("a minute of compilation; CI compiles the attention of a warm-up, without and with a window")
def test_attention_of_every_shape_and_option_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    """As gpu_variants.py combines them: about a minute of a core for what would take an hour."""
    for compiled in _compile(tmp_path, capabilities, "variants", "attention"):
        assert set(compiled) == {*ATTENTION, "_store_kernel"}
        assert min(compiled[name] for name in ("prefill_kernel", "split_decode_kernel")) >= 4  # a head_dim each


@pytest.mark.exhaustive("minutes of compilation: a key of 576 elements is long")
@pytest.mark.timeout(1800)
def test_latent_attention_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part = ["few"] if len(capabilities) == 1 else []
    for compiled in _compile(tmp_path, capabilities, "variants", *part, "latents"):
        assert set(compiled) == {*ATTENTION, "rotate_and_store_latents_kernel"}


@pytest.mark.exhaustive("a minute of compilation; the latents that are not expanded are the same kernels")
def test_expanded_latents_compile_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part = ["few"] if len(capabilities) == 1 else []
    for compiled in _compile(tmp_path, capabilities, "variants", *part, "expanded"):
        assert set(compiled) == {"prefill_kernel"}


def test_every_kernel_that_samples_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    choices = {"best_of_tokens_kernel", "best_of_parts_kernel", "group_maxima_kernel", "truncated_draw_kernel"}
    sizes = VOCAB_SIZES[:1] if len(capabilities) == 1 else VOCAB_SIZES
    for compiled in _compile(tmp_path, capabilities, "sampling", *sizes):
        assert set(compiled) == choices | {"change_tokens_kernel", "penalise_kernel", "bitmask_kernel"}
        assert compiled["best_of_tokens_kernel"] >= 4  # with and without noise, and indices


def test_every_kernel_of_experts_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    part, mixtures, same = (["few"], 3, 0) if len(capabilities) == 1 else ([], 6, 1)
    for compiled in _compile(tmp_path, capabilities, "experts", *part):
        assert compiled == {  # for each mixture one: few tokens and many launch the same
            "route_kernel": mixtures,
            "group_kernel": mixtures,
            # The first product, without and with weights of rows; two of six mixtures have the same second product.
            "grouped_linear_kernel": 3 * mixtures - same,
            "combine_kernel": mixtures,
        }


def test_every_kernel_of_a_warm_up_compiles_for_gpus(tmp_path: Path, capabilities: list[int]) -> None:
    for compiled in _compile(tmp_path, capabilities, "models", "Qwen3-0.6B", shared_by_decodes=TWO_TILES):
        assert compiled == {  # without and with a sliding window, or states
            "prefill_kernel": 2,
            "plan_splits_kernel": 2,
            "split_decode_kernel": 2,
            "reduce_splits_kernel": 1,
            "_store_kernel": 1,
            "_take_pending_kernel": 2,
            "copy_pages_kernel": 2,  # from the pool, and to it
        }

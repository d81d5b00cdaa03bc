"""Weights that stay codes: nearly the answers of the dequantised weights, with the same bits in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.llm import LLM, RequestOutput
from engine.models.checkpoint import checkpoint as checkpoint_module
from engine.models.decoder import coded_plan
from engine.sampling_params import SamplingParams
from kernels.coded_weight import CodedMatrix
from kernels.cpu.coded_linear import CodedLinear
from kernels.cpu.library import library
from kernels.cpu.linear import has_tiles
from kernels.dequant.stored import unpacked
from tests.engine.models.checkpoint.formats import test_bitsandbytes as of_bitsandbytes
from tests.engine.models.checkpoint.formats import test_compressed_integers as of_integers
from tests.engine.models.checkpoint.formats import test_fp4 as of_fp4
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats import test_gptq_awq as of_gptq_awq
from tests.engine.models.checkpoint.formats import test_mlx as of_mlx
from tests.engine.models.checkpoint.formats.quantised import Encoded, is_linear, save_quantised, tiny_model
from tests.engine.models.decoder.latent.latent_families import build_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model
from tests.engine.models.decoder.recurrent.test_formats import INT4
from tests.engine.models.gguf import converted
from tests.engine.oracle import answers, make_llm, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler is installed")

VOCABULARY = 120
# int8 activations have an error of up to 1 / 254 of the largest of a block. Random weights add these up.
CLOSE, SAME = 0.3, 1e-5
# Levels of a byte of NF4 and FP4 have an error about as large beside it, and a token may get another expert.
CLOSE_WITH_LEVELS = {"fp4": 0.6, "nf4-moe": 1.0, "nf4-qwen3.5": 1.0}

MODELS: dict[str, Callable[[Path], Path]] = {
    "gptq": lambda path: of_gptq_awq.save("gptq", path).path,
    "gptq-desc_act": lambda path: of_gptq_awq.save("gptq desc_act", path).path,
    "gptq-desc_act-head": lambda path: with_head(path),
    "gptq-orders": lambda path: of_gptq_awq.save("gptq desc_act, each its own", path).path,
    "int4-actorder-8": lambda path: of_integers.save("int4 actorder", path).path,
    "int4-actorder": lambda path: of_integers.save("int4 actorder, groups of 32", path).path,
    "awq": lambda path: of_gptq_awq.save("awq", path).path,
    "int4": lambda path: of_integers.save("int4 symmetric", path).path,
    "mxfp4": lambda path: of_fp4.save("mxfp4", path).path,
    "nvfp4": lambda path: of_fp4.save("modelopt", path).path,
    "fp8": lambda path: of_fp8.save("block", path).path,
    "fp8-channel": lambda path: of_fp8.save("channel", path, "qwen2").path,
    "fp8-moe": lambda path: of_fp8.save("block", path, "qwen3_moe", num_hidden_layers=2).path,
    "mxfp8": lambda path: of_fp8.save("mxfp8", path).path,
    "fp8-qwen3.5": lambda path: fp8_by_layers(path, build_recurrent_model("qwen3.5")),
    "fp8-nemotron-3": lambda path: fp8_by_layers(path, build_recurrent_model("nemotron-3-super")),
    "fp8-falcon-h1": lambda path: fp8_by_layers(path, build_recurrent_model("falcon-h1")),
    "int4-granite-4-h": lambda path: (
        save_quantised(
            build_recurrent_model("granite-4-h"),
            path,
            lambda _, weight: of_integers.encode(weight, "int4 symmetric"),
            {"quantization_config": INT4},
            chosen=is_projection,
        ).path
    ),
    "fp8-deepseek-v3": lambda path: fp8_by_layers(path, build_latent_model("deepseek-v3")),
    "bitsandbytes": lambda path: of_bitsandbytes.save("int8", path).path,
    "nf4": lambda path: of_bitsandbytes.save("nf4 double", path).path,
    "fp4": lambda path: of_bitsandbytes.save("fp4", path, "qwen2").path,
    "nf4-moe": lambda path: of_bitsandbytes.save("nf4", path, "qwen3_moe", num_hidden_layers=2).path,
    "nf4-qwen3.5": lambda path: nf4_by_layers(path, build_recurrent_model("qwen3.5")),
    "mlx": lambda path: of_mlx.save(4, path).path,
    "llama": lambda path: gguf(path, "llama"),
    "qwen3": lambda path: gguf(path, "qwen3"),
    "qwen3moe": lambda path: gguf(path, "qwen3moe"),
    "gemma3": lambda path: gguf(path, "gemma3"),
    "qwen35": lambda path: gguf(path, "qwen35"),
    "falcon-h1": lambda path: gguf(path, "falcon-h1"),
    "granitehybrid-moe": lambda path: gguf(path, "granitehybrid-moe"),
}
SMALL = ("gptq", "gptq-desc_act", "nvfp4", "nf4", "fp8", "fp8-moe", "llama", "qwen3moe", "qwen35", "falcon-h1")
EVERY = [
    pytest.param(name, marks=() if name in SMALL else pytest.mark.long) for name in MODELS if name != "int4-actorder-8"
]


def fp8_by_layers(path: Path, model: PreTrainedModel) -> Path:
    """Save a model as FP8 in blocks but for its embedding, head and routers."""
    return save_quantised(model, path, of_fp8.fp8_block, of_fp8.fp8(), chosen=is_projection).path


def with_head(path: Path) -> Path:
    """Save a model whose head's inputs are in the order of GPTQ's groups as well."""
    config = {"quantization_config": of_gptq_awq.gptq_config(4, desc_act=True)}
    model = tiny_model(intermediate_size=224)

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        return of_gptq_awq.gptq(weight, 4, "desc_act")

    return save_quantised(model, path, encode, config, chosen=lambda name: is_linear(name) or "lm_head" in name).path


def nf4_by_layers(path: Path, model: PreTrainedModel) -> Path:
    """Save a model with codes of bitsandbytes of 4 bits."""

    def encode(_: str, weight: torch.Tensor) -> Encoded:
        return of_bitsandbytes.four_bits(weight, "nf4", is_nested=True)

    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    return save_quantised(model, path, encode, config, chosen=is_projection).path


def is_projection(name: str) -> bool:
    return "layers" in name and "_proj" in name


def gguf(path: Path, name: str) -> Path:
    file = path / f"{name}.gguf"
    converted.write_gguf(converted.build_model(name), name, file)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: MODELS[name](tmp_path_factory.mktemp(name)))


def prompts(count: int, length: int = 24) -> list[list[int]]:
    return [random_tokens(random.Random(seed), length, VOCABULARY) for seed in range(count)]


def coded_llm(path: Path, **options: Any) -> LLM:
    """Return an engine; codes that are floats are multiplied in bfloat16 only."""
    dtype = "bfloat16" if "fp8" in str(path) else "float32"
    return make_llm(str(path), **{"quantization": None, "num_blocks": 64, "block_size": 8, "dtype": dtype} | options)


def logprobs(path: Path, **options: Any) -> list[float]:
    """Return the log-probability of each prompt token."""
    llm = coded_llm(path, **options)
    outputs = run(llm, prompts(2), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    llm.engine.close()
    return [value for output in outputs for value in _prompt_logprobs(output)]


def _prompt_logprobs(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]


def largest_difference(path: Path, **options: Any) -> float:
    exact = logprobs(path, quantization="dequantize")
    return max(abs(a - b) for a, b in zip(exact, logprobs(path, **options), strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_answers_are_nearly_those_of_the_dequantised_weights(name: str, model: Callable[[str], Path]) -> None:
    difference = largest_difference(model(name))
    if name == "mxfp8" and has_tiles():  # its scales are powers of two, and tiles add in the order of bfloat16 weights
        assert difference == 0.0
    else:
        assert SAME < difference < CLOSE_WITH_LEVELS.get(name, CLOSE)


@pytest.mark.parametrize("name", EVERY)
def test_a_token_has_the_same_bits_in_any_batch(name: str, model: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    many = prompts(5)
    together = coded_llm(model(name), num_threads=2)
    expected = run(together, many, params)
    chunked = coded_llm(model(name), num_threads=1, max_num_batched_tokens=7)
    alone = [run(chunked, [prompt], params)[0] for prompt in many]
    assert answers(alone) == answers(expected)
    for one, other in zip(alone, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob
    for llm in (together, chunked):
        llm.engine.close()


@pytest.mark.parametrize("name", ["gptq", "gptq-desc_act", "nf4", "fp8", "fp8-moe", "llama", "qwen3moe", "qwen35"])
def test_ranks_compute_nearly_the_same(
    name: str, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    assert largest_difference(model(name), tensor_parallel_size=2) < CLOSE


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("falcon-h1", "self_attn.qkv_proj.weight"),
        ("falcon-h1", "recurrent.in_proj.weight"),
        ("qwen3moe", "mlp.experts.down_proj"),
        ("qwen3moe", "mlp.experts.gate_up_proj"),
        ("granitehybrid-moe", "mlp.shared_expert.gate_up_proj.weight"),
    ],
)
def test_weights_of_a_layer_may_be_of_different_kinds(
    name: str, plain: str, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several of them read the same rows, which each kind has packed otherwise."""
    for names in coded_plan._NAMES.values():
        monkeypatch.delitem(names, plain, raising=False)
    assert SAME < largest_difference(model(name)) < CLOSE


def coded_linears(monkeypatch: pytest.MonkeyPatch, path: Path, **options: Any) -> list[CodedLinear]:
    """Return the layers of a model whose weights stay codes."""
    made: list[CodedLinear] = []
    initialise = CodedLinear.__init__

    def init(self: CodedLinear, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(CodedLinear, "__init__", init)
    coded_llm(path, **options).engine.close()
    return made


def test_codes_take_the_bytes_of_the_file(model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    linears = coded_linears(monkeypatch, model("int4"))
    assert len(linears) == 2 * 4  # of two layers; the head is not quantised
    for linear in linears:
        weights = linear.in_features * linear.out_features
        assert 4 <= 8 * linear.num_bytes / weights < 6.5  # bits: small layers have padding


def test_fused_projections_may_have_several_formats(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    linears = coded_linears(monkeypatch, model("llama"))
    assert max(len(linear._sections) for linear in linears) > 1


def test_floats_are_dequantised_for_another_dtype(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(coded_linears(monkeypatch, model("fp8"))) == 2 * 4
    assert not coded_linears(monkeypatch, model("fp8"), dtype="float32")


@pytest.mark.parametrize(("kind", "code"), [("block", 0x7F), ("block", 0xFF)])
def test_a_code_that_is_no_number_is_refused(kind: str, code: int, tmp_path: Path) -> None:
    path = of_fp8.save(kind, tmp_path).path
    name, file = "model.layers.1.mlp.down_proj.weight", path / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(torch.uint8)[100, 50] = code
    save_file(tensors, file, {"format": "pt"})
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(ModelLoadError, match=f"'{name}'.*not finite"):
            coded_llm(path, dtype=dtype)


def test_nothing_stays_codes_if_that_is_asked_for(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not coded_linears(monkeypatch, model("gptq"), quantization="dequantize")
    assert not coded_linears(monkeypatch, model("gptq"), quantization="int8")


def test_the_log_says_what_stays_codes_and_what_does_not(
    model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    coded_llm(model("gptq")).engine.close()
    assert "14 weights (GPTQ) are computed from their codes" in caplog.text
    caplog.clear()
    coded_llm(model("gptq"), quantization="dequantize").engine.close()
    assert "14 weights (GPTQ) are dequantised to float32, because quantization says so" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "count", "reason"),
    [
        ("gptq-orders", {}, 6, "projections that are computed together have their inputs in different orders"),
        ("nf4", {}, 2, "their outputs, of 200 inputs each, begin within groups of 16 inputs with one scale"),
        ("int4-actorder-8", {}, 14, "groups of 8 inputs are not computed from their codes"),
        ("fp8", {"dtype": "float32"}, 14, "FP8 is computed from its codes with dtype bfloat16"),
    ],
)
def test_the_log_says_why_weights_are_dequantised(
    name: str,
    options: dict[str, Any],
    count: int,
    reason: str,
    model: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    coded_llm(model(name), **options).engine.close()
    assert any(line.startswith(f"{count} weights") and f"because {reason}:" in line for line in caplog.messages)


def test_the_log_says_which_weights_ranks_dequantise(
    model: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    caplog.set_level("INFO")
    coded_llm(model("gptq-desc_act"), tensor_parallel_size=2).engine.close()
    reason = "ranks divide their inputs, which are in the order of their groups"
    assert any(line.startswith("4 weights (GPTQ)") and f"because {reason}:" in line for line in caplog.messages)


CHANGES: dict[str, Callable[[CodedMatrix], CodedMatrix]] = {
    "neighbouring codes swapped": lambda m: m.with_parts(m.parts | {"codes": m.codes.view(len(m.codes), -1, 2).flip(2)
                                                                    .reshape(m.codes.shape)}),
    "a neighbour's scale": lambda m: m.with_parts(m.parts | {"outer_scales": m.outer_scales.roll(1, 1)}),
    "zero points one too high": lambda m: m.with_parts(m.parts | {"zero_points": m.parts["zero_points"] + 1}),
    "desc_act ignored": lambda m: replace(m, input_order=torch.arange(m.shape[1], dtype=torch.int32)),
}  # fmt: skip


HAVE = {"gptq": {"zero"}, "gptq-desc_act": {"zero", "desc_act"}, "nf4": set()}


def applies(name: str, change: str) -> bool:
    return {"zero", "desc_act"} & set(change.split()) <= HAVE[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in ("gptq", "gptq-desc_act", "nf4") for change in CHANGES if applies(name, change)],
)
def test_a_planted_error_is_seen(
    name: str, change: str, model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = checkpoint_module.read_coded
    monkeypatch.setattr(checkpoint_module, "read_coded", lambda *arguments: CHANGES[change](unpacked(read(*arguments))))
    assert largest_difference(model(name)) > 2 * CLOSE

"""Quantised checkpoints whose weights stay codes on a simulated GPU: the answers of the dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.llm import LLM
from kernels.experts.coded_stack import CodedStack
from kernels.linear import coded_triton
from kernels.linear.coded_sections import CodedSection
from kernels.linear.coded_triton import CodedTritonLinear
from kernels.linear.fp8_triton import Fp8Linear
from tests.gpu_rehearsal.coded_models import SAVE
from tests.gpu_rehearsal.family_models import EAGER, GRAPHS, SCENARIO, TWO_RANKS, Models, check_steps, start
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import OPTIONS, Scenario, answers, generate


class DequantisedModels(Models):
    """Models whose expected answers are those of their dequantised weights."""

    def expected(self, path: str, scenario: Any) -> Any:
        options = {"device": "cpu", "skip_tokenizer_init": True, "quantization": "dequantize"}
        return answers(generate(LLM(path, **{**OPTIONS, **options}), scenario))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return DequantisedModels(lambda name, path: str(SAVE[name](path)), tmp_path_factory)


QUANTISES = "fp8 of activations"


def shard_of(llm: LLM) -> Any:
    """Return the model's modules."""
    return llm.engine.runner.workers.local.shard.model  # type: ignore[attr-defined]


def coded_layers(llm: LLM) -> list[CodedTritonLinear]:
    model: Any = llm.engine.runner.workers.local.shard.model
    assert not any(parameter.is_meta for parameter in model.parameters())
    return [module for module in model.modules() if isinstance(module, CodedTritonLinear)]


def coded_stacks(llm: LLM) -> list[CodedStack]:
    model: Any = llm.engine.runner.workers.local.shard.model
    return [module for module in model.modules() if isinstance(module, CodedStack)]


@pytest.mark.parametrize("case", ["auto-round"], indirect=True)
def test_answers_are_those_of_the_dequantised_weights(case: tuple[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, GRAPHS)
    assert gpu.launches.counts["coded_linear_kernel"]
    assert gpu.launches.counts["add_parts_kernel"]


@pytest.mark.parametrize("case", ["auto-round"], indirect=True)
def test_answers_with_weights_that_are_decoded_into_memory(
    case: tuple[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = coded_triton._tiles
    monkeypatch.setattr(coded_triton, "_tiles", lambda *layer: [(1, tile) for _, tile in tiles(*layer)[:1]])
    check_steps(gpu, *case, GRAPHS)
    assert gpu.launches.counts["decode_kernel"]


def test_activations_are_quantised_if_the_scheme_says_so(models: Models, gpu: Rehearsal) -> None:
    """No other engine computes so here; kernels are compared with the reference elsewhere."""
    path, found = models.path(QUANTISES), []
    for options in (GRAPHS, EAGER, EAGER | {"batch_invariant": True}):
        gpu.launches.counts.clear()
        llm = start(gpu, path, **options)
        layers = [module for module in shard_of(llm).modules() if isinstance(module, Fp8Linear)]
        assert [layer.group for layer in layers] == [128] * (2 * 3)
        assert len(coded_layers(llm)) == 2  # whose number of inputs is not a multiple of 16
        found.append(answers(generate(llm, SCENARIO)))
        assert {"quantize_groups_kernel", "fp8_linear_kernel"} <= set(gpu.launches.counts)
        gpu.machine.check()
    assert found[0] == found[1]


@pytest.mark.exhaustive("what CI runs for one model, for several formats, for experts, and for two ranks")
@pytest.mark.parametrize("options", [GRAPHS, EAGER, TWO_RANKS], ids=["graphs", "eager", "two ranks"])
@pytest.mark.parametrize("case", [name for name in SAVE if name != QUANTISES], indirect=True)
def test_answers_of_every_model(case: tuple[str, Any], options: dict[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, options)
    assert gpu.launches.counts["coded_linear_kernel"]


@pytest.mark.parametrize("case", ["auto-round"], indirect=True)
def test_batch_invariant_layers_answer_alike(case: tuple[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, EAGER | {"batch_invariant": True})
    assert gpu.launches.counts["coded_linear_kernel"]
    assert "add_parts_kernel" not in gpu.launches.counts  # no sum is divided


def test_which_layers_stay_codes(models: Models, gpu: Rehearsal, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    dense = start(gpu, models.path("gptq"), **EAGER)
    assert len(coded_layers(dense)) == 2 * 4  # of two layers; the head is not quantised
    assert "14 weights (GPTQ) are computed from their codes" in caplog.text
    for layer in coded_layers(dense):
        num_bytes = sum(weight.nbytes for weight in layer.parameters())
        num_inputs = -(-layer.in_features // 128) * 128  # whole blocks of words
        assert 4 <= 8 * num_bytes / (num_inputs * layer.out_features) < 5.5
    experts = start(gpu, models.path("qwen3-moe"), **EAGER)
    assert len(coded_layers(experts)) == 3 * 2 + 2  # of three layers, one without experts
    assert len(coded_stacks(experts)) == 2 * 2
    assert "dequantised" not in caplog.text
    assert len(coded_layers(start(gpu, models.path("gptq-head"), **EAGER))) == 2 * 4 + 1
    mixed = coded_layers(start(gpu, models.path("auto-round"), **EAGER))
    assert max(len(layer.sections) for layer in mixed) == 2
    gpu.machine.check()


@pytest.mark.parametrize("case", ["mlx-tied"], indirect=True)
def test_a_tied_head_and_its_embedding_are_computed_from_the_same_codes(
    case: tuple[str, Any], gpu: Rehearsal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    check_steps(gpu, *case, GRAPHS)
    assert gpu.launches.counts["decode_kernel"]  # of the embedding's rows
    assert "dequantised" not in caplog.text


def test_a_tied_head_has_one_copy_of_the_codes(models: Models, gpu: Rehearsal) -> None:
    llm = start(gpu, models.path("mlx-tied"))
    model: Any = llm.engine.runner.workers.local.shard.model
    assert model.embed_tokens.codes is model.lm_head
    assert len(coded_layers(llm)) == 2 * 4 + 1
    untied = start(gpu, models.path("mlx"))
    model = untied.engine.runner.workers.local.shard.model
    assert model.embed_tokens.codes is not model.lm_head
    assert not isinstance(model.lm_head, CodedTritonLinear)
    gpu.machine.check()


def test_no_number_of_rows_compiles_a_kernel(models: Models, gpu: Rehearsal) -> None:
    options = {"max_num_batched_tokens": 300, "max_num_seqs": 40}
    llm = start(gpu, models.path("gptq-head"), dtype="bfloat16", **options, **EAGER)
    assert len({layer.scratch.data_ptr() for layer in coded_layers(llm)}) == 1  # of all layers
    gpu.launches.counts.clear()
    requests = Scenario([{"temperature": 0.0}] * 40, [3, 1, 7, 90, 250])
    for count in (1, 15, 40):
        generate(llm, replace(requests, params=requests.params[:count]))
    assert {16, 64} <= gpu.launches.arguments["coded_linear_kernel.BLOCK_ROWS"]
    assert gpu.launches.counts["decode_kernel"]  # for many rows
    gpu.machine.check()


@pytest.mark.parametrize("case", ["qwen3-moe"], indirect=True)
def test_experts_that_stay_codes_answer_like_dequantised_ones(case: tuple[str, Any], gpu: Rehearsal) -> None:
    check_steps(gpu, *case, GRAPHS)
    assert gpu.launches.counts["grouped_coded_linear_kernel"]
    assert "grouped_linear_kernel" not in gpu.launches.counts


@pytest.mark.parametrize("case", ["mixed-moe"], indirect=True)
def test_experts_in_several_formats_are_dequantised(
    case: tuple[str, Any], gpu: Rehearsal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    check_steps(gpu, *case, EAGER)
    assert "are dequantised to float32, because gates and ups are in different formats" in caplog.text
    assert {"grouped_linear_kernel", "grouped_coded_linear_kernel"} <= set(gpu.launches.counts)


@pytest.mark.exhaustive("what CI runs for linear layers, for experts")
def test_no_number_of_tokens_compiles_a_kernel_of_experts(models: Models, gpu: Rehearsal) -> None:
    options = {"max_num_batched_tokens": 600, "max_num_seqs": 40, "enforce_eager": True}
    llm = start(gpu, models.path("qwen3-moe"), dtype="bfloat16", **options)
    gpu.launches.arguments.clear()
    requests = Scenario([{"temperature": 0.0}] * 40, [3, 1, 7, 90, 250, 500])
    for count in (1, 15, 40):
        generate(llm, replace(requests, params=requests.params[:count]))
    assert gpu.launches.arguments["grouped_coded_linear_kernel.BLOCK_ROWS"] == {16, 64}
    gpu.machine.check()


def test_nothing_stays_codes_if_that_is_asked_for(models: Models, gpu: Rehearsal) -> None:
    assert not coded_layers(start(gpu, models.path("gptq"), quantization="dequantize", **EAGER))


@pytest.mark.parametrize("case", ["gptq"], indirect=True)
def test_a_planted_error_is_seen(case: tuple[str, Any], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = CodedSection._packed

    def swapped(section: CodedSection, codes: torch.Tensor) -> torch.Tensor:
        octets = pack(section, codes).view(torch.uint8)
        return (octets >> 4 | octets << 4).view(torch.uint16)

    monkeypatch.setattr(CodedSection, "_packed", swapped)
    path, expected = case
    assert answers(generate(start(gpu, path), SCENARIO)) != expected
    gpu.machine.check()

"""Quantised checkpoints of models of text, as they are published, answer like transformers' dequantised model."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.sampling_params import SamplingParams
from tests.engine.models.checkpoint.formats.quantised import FILE, Quantised, Tensors, check_tokens, save_quantised
from tests.engine.models.published.text_pairs import TEXT_PAIRS, Pair
from tests.engine.models.published.weight_formats import FORMS
from tests.engine.oracle import answers, make_llm, oracle_beams, random_tokens, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

NEVER = re.compile(
    r"norm|router|gate\.weight$|shared_expert_gate|conv|embed|lm_head|weights_proj|mlp\.gate\.|A_log|dt_bias|statics"
)
FEW = (
    *("Qwen2.5-7B-Instruct-GPTQ-Int4", "phi-4-FP8-dynamic", "MiniMax-M2.5", "GLM-4.5-Air-FP8", "DeepSeek-V3.1"),
    *("Qwen3-Next-80B-A3B-Instruct-FP8", "NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "Kimi-K2-Thinking"),
    *("Qwen3-30B-A3B-NVFP4", "Qwen3-4B-MLX-4bit", "Mixtral-8x7B-Instruct-v0.1-AWQ", "DeepSeek-V3.2"),
)


MORE = pytest.mark.exhaustive("the remaining pairs of a family and a format, in beams and on two ranks")


def is_quantised(name: str, weight: torch.Tensor, pair: Pair) -> bool:
    """Return whether a weight is one that the checkpoint quantises; formats need multiples of 32."""
    fits = weight.dim() == 2 and name.endswith(".weight") and all(size % 32 == 0 for size in weight.shape)
    is_kept = NEVER.search(name) is not None or any(part in name for part in pair.skipped)
    return (fits and not is_kept) or any(part in name for part in pair.further)


def further_layer(pair: Pair) -> Tensors:
    """Return the tensors of a layer that predicts further tokens."""
    encode, _, _ = FORMS[pair.form]
    if not pair.mtp:
        return {}
    layer: Tensors = {f"{pair.mtp}.{norm}.weight": torch.ones(64) for norm in ("enorm", "hnorm", "shared_head.norm")}
    layer[f"{pair.mtp}.eh_proj.weight"] = torch.randn(64, 128)
    for module in ("self_attn.o_proj", "mlp.experts.0.gate_proj"):
        encoded = encode(f"{pair.mtp}.{module}", torch.randn(64, 64))
        layer |= {f"{pair.mtp}.{module}.{end}": tensor.contiguous() for end, tensor in encoded.tensors.items()}
    return layer


def save(name: str, path: Path) -> Quantised:
    pair = TEXT_PAIRS[name]
    encode, config, files = FORMS[pair.form]
    model = pair.build()
    pair.save(model, path / "names")
    stored = load_file(path / "names" / FILE)
    return save_quantised(
        model,
        path,
        encode,
        config,
        extra=pair.extra | further_layer(pair),
        chosen=lambda weight: is_quantised(weight, stored[weight], pair),
        files=files,
        save=pair.save,
    )


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in TEXT_PAIRS]
)
def test_the_tokens_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    quantised = save(name, tmp_path)
    assert len(quantised.values) >= 6
    check_tokens(quantised)


ONE_RANK = ("MiMo-V2-Flash",)  # whose modules ranks cannot share


@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW[:2] else pytest.param(name, marks=pytest.mark.long if name in FEW else MORE)
        for name in TEXT_PAIRS
        if name not in ONE_RANK
    ],
)
def test_two_ranks_give_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    check_tokens(save(name, tmp_path), tensor_parallel_size=2)


@pytest.mark.parametrize(
    "name",
    [name if name in FEW[:1] else pytest.param(name, marks=MORE) for name in TEXT_PAIRS],
)
def test_beams_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    quantised = save(name, tmp_path)
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=6, ignore_eos=True)
    llm = make_llm(str(quantised.path), num_blocks=64, block_size=8, max_num_batched_tokens=16)
    prompt = random_tokens(random.Random(3), 20, 120)
    assert answers(run(llm, [prompt], params)) == [oracle_beams(quantised.model, prompt, params, [])[0]]
    llm.engine.close()

"""What cannot be served is refused for its real reason, in a sentence that names it and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deployments.config import AppConfig
from engine.errors import ConfigError, ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.config.files.config_json import read_config_json
from engine.models.config.files.hf_config import load_hf_config

OWN_CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
ODD_FORMAT = {"quantization_config": {"quant_method": "of-its-own"}}

RECURRENT, TWO_HALVES = "its recurrent layers are of a kind", "each of its layers has two latent attentions"
NOT_COMPARED = "it also takes images or sound, and no test has compared its text part"
INDEXED = "its sparse attention chooses keys in a way of its own"
NO_CLASS = "transformers has no class of this name, and code of a checkpoint's own is never run"


def part(name: str, reason: str) -> str:
    return f"its text part, {name}, is not: {reason}"


# The fields that decide, of published checkpoints: architecture, model_type and others.
PUBLISHED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "DeepSeek-V4-Flash": ("DeepseekV4ForCausalLM", "deepseek_v4", FP8, INDEXED),
    "DeepSeek-V4-Flash-FP8": ("DeepseekV4ForCausalLM", "deepseek_ref", FP8, INDEXED),
    "LLaVA-OneVision of its own code": (
        "LlavaQwenForCausalLM",
        "llava",
        OWN_CODE,
        f"{NO_CLASS}; give the version for transformers' own classes, whose name ends with -hf",
    ),
    "Kimi-K3": ("KimiK3ForConditionalGeneration", "kimi_k3", OWN_CODE, "its text part is not Kimi Linear"),
    "Llama-3_3-Nemotron-Super-49B": ("DeciLMForCausalLM", "nemotron-nas", OWN_CODE, NO_CLASS),
    "Llama-3.2-11B-Vision-Instruct": (
        "MllamaForConditionalGeneration",
        "mllama",
        {},
        "its layers of cross-attention, which text alone leaves out, are not left out",
    ),
    "paligemma2-3b-mix-224": (
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        {},
        "each token of its prompt attends to all the others, also to later ones",
    ),
    "MiniMax-M3": ("MiniMaxM3ForCausalLM", "minimax_m3", {}, INDEXED),
    "MiniMax-M3-NVFP4": (
        "MiniMaxM3SparseForConditionalGeneration",
        "minimax_m3_vl",
        OWN_CODE | ODD_FORMAT | {"text_config": {"architectures": ["MiniMaxM3SparseForCausalLM"]}},
        part("MiniMaxM3VLForCausalLM", INDEXED),
    ),
    "LongCat-Flash-Chat": ("LongcatFlashForCausalLM", "longcat_flash", OWN_CODE, TWO_HALVES),
    "Step-3.7-Flash": ("Step3p7FlashForCausalLM", "step3p7", FP8, "its layers differ in the number of their att"),
    "whisper-large-v3": ("WhisperForConditionalGeneration", "whisper", {}, "it is an encoder, or needs one"),
}


def checkpoint(path: Path, fields: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(fields))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_refused_for_its_real_reason(tmp_path: Path, name: str) -> None:
    """By the engine and by the launcher alike, before its own code and the format of its weights."""
    architecture, model_type, others, reason = PUBLISHED[name]
    checkpoint(tmp_path, {"architectures": [architecture], "model_type": model_type} | others)
    for read in (load_hf_config, lambda path: AppConfig.parse({"model": str(path)}).require_model()):
        with pytest.raises(
            ModelLoadError, match=f"^architecture '{architecture}' is not supported:? ?{reason}"
        ) as error:
            read(tmp_path)
        assert str(error.value).endswith(("; docs/models.md lists what is served", "whose name ends with -hf"))


@pytest.mark.parametrize(
    "name", ["Qwen3ForSequenceClassification", "BertForMaskedLM", "Qwen2ForRewardModel", "Gemma3TextModel"]
)
def test_a_model_that_generates_no_text_is_named_as_that(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, {"architectures": [name], "model_type": "qwen3"} | OWN_CODE)
    with pytest.raises(ModelLoadError, match=f"'{name}' is not supported: it does not generate text; docs/models.md"):
        read_config_json(tmp_path)


def test_an_architecture_without_a_test_is_refused_at_once(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"architectures": ["NewForCausalLM"], "model_type": "new"})
    with pytest.raises(ModelLoadError, match="'NewForCausalLM' is not supported: no test has compared it .*; docs/mod"):
        read_config_json(tmp_path)


@pytest.mark.parametrize("model_type", ["new", None, 5, ["llama"], "x" * 1000])
def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path: Path, model_type: Any) -> None:
    checkpoint(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": model_type})
    with pytest.raises(
        ModelLoadError, match=r"has the model_type .*, which transformers \d\S* does not know;"
    ) as error:
        load_hf_config(tmp_path)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (["model-Q4_K_M.gguf"], r"give the path of a GGUF file itself, such as '.*model-Q4_K_M\.gguf'"),
        (
            ["params.json", "consolidated.safetensors", "tekken.json"],
            r"params\.json is of Mistral's or Meta's own format",
        ),
        (["consolidated.00.pth", "params.json"], r"params\.json is of Mistral's or Meta's own format"),
        (["adapter_config.json", "adapter_model.safetensors"], "is of an adapter, .*: merge it into its base model"),
        (["model_index.json"], "is of a diffusion pipeline: give a language model"),
        (["model.nemo"], r"model\.nemo is of NeMo: give the checkpoint with config\.json and model\.safetensors"),
        (["model.onnx"], r"model\.onnx is compiled for ONNX: give the checkpoint"),
        (["openvino_model.xml", "openvino_model.bin"], "is compiled for OpenVINO"),
        (["pytorch_model-00001-of-00002.bin"], "is pickled, which can run code: convert it to safetensors"),
        (["weights.npz"], r"weights\.npz is not in safetensors"),
        (["notes.txt"], "give the path of a Hugging Face checkpoint"),
        ([], "give the path of a Hugging Face checkpoint"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else None,
)
def test_a_directory_of_another_form_is_named(tmp_path: Path, files: list[str], remedy: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=f"has no config.json; .*{remedy}"):
        read_config_json(tmp_path)
    checkpoint(tmp_path, {})
    with (
        pytest.raises(ModelLoadError, match=rf"has no model\.safetensors and no .*; .*{remedy}"),
        open_checkpoint(tmp_path),
    ):
        pass


def test_files_of_another_form_beside_a_checkpoint_do_not_matter(tmp_path: Path) -> None:
    for name in ("model.gguf", "consolidated.safetensors", "params.json", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with open_checkpoint(checkpoint(tmp_path, {})) as opened:
        assert opened.names == ["a"]

"""What the adapter refuses, with an error that names the reason: never an answer that is nearly right."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.models.adapter.loader import load_transformers_decoder
from engine.models.config.families.architectures import PROVEN, require_proven
from engine.models.config.families.refused import REFUSED, UNKNOWN
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.files.text_parts import MULTIMODAL
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import ModelConfig
from engine.models.config.transformers_config import TransformersConfig
from engine.models.tensor_parallel import TensorParallel
from engine.worker.model_worker import ModelWorker
from tests.engine.checkpoints import save_checkpoint
from tests.engine.conftest import SavedModel
from tests.engine.models.adapter.conftest import Zoo, load
from tests.engine.models.adapter.tiny_models import build_config, build_model

CONVERTED = "give the version for transformers' own classes, whose name ends with -hf"
GRANITE = "GraniteForCausalLM"


def shape_of(architecture: str, **options: Any) -> TransformersConfig:
    return TransformersConfig.from_hf(build_config(architecture, **options))


@pytest.fixture
def checkpoint(zoo: Zoo, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(zoo(GRANITE).path, tmp_path / "checkpoint"))


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_batch_invariance_needs_our_own_decoder(zoo: Zoo) -> None:
    options: dict[str, Any] = {"model": zoo(GRANITE).path, "device": "cpu", "model_impl": "transformers"}
    problem = "batch_invariant=True needs our own decoder, and this model is computed by transformers' modules; leave"
    with pytest.raises(ConfigError, match=problem):
        ModelWorker(EngineConfig(**options, batch_invariant=True))


# --- architectures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_is_refused_with_its_reason(architecture: str) -> None:
    config = build_config(GRANITE)
    config.architectures = [architecture]
    with pytest.raises(ModelLoadError) as error:
        read_shape(config, "auto")
    why = f"architecture '{architecture}' is not supported: {REFUSED[architecture]}; "
    assert str(error.value).startswith(why)
    assert str(error.value).removeprefix(why) in ("docs/models.md lists what is served", CONVERTED)


def names_in(mapping: Mapping[str, str | tuple[str, ...]]) -> set[str]:
    return {name for names in mapping.values() for name in ((names,) if isinstance(names, str) else names)}


@pytest.mark.parametrize(
    "mapping",
    [
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ],
    ids=["causal", "seq2seq", "image-text", "multimodal"],
)
def test_every_language_model_of_transformers_is_served_or_refused_with_a_reason(
    mapping: Mapping[str, str | tuple[str, ...]],
) -> None:
    assert len(names_in(mapping)) > 30
    for name in names_in(mapping) - PROVEN - MULTIMODAL.keys():
        with pytest.raises(ModelLoadError) as error:
            require_proven(name)
        assert UNKNOWN not in str(error.value)


def test_no_proven_name_is_misspelt() -> None:
    not_mapped = {"Mistral4ForCausalLM"}  # transformers has the class, and none for the model type
    names = names_in(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | not_mapped
    assert names >= PROVEN | ARCHITECTURES.keys()


def test_an_architecture_that_no_test_compared_is_refused() -> None:
    config = build_config(GRANITE)
    config.architectures = ["NewForCausalLM"]
    for model_impl in ("auto", "transformers"):
        with pytest.raises(ModelLoadError, match="no test has compared it .*; docs/models.md lists what is served"):
            read_shape(config, model_impl)


def test_the_implementation_can_be_chosen(qwen3: SavedModel) -> None:
    for model_impl, kind in (("auto", ModelConfig), ("pagoda", ModelConfig), ("transformers", TransformersConfig)):
        assert isinstance(read_shape(load_hf_config(qwen3.path), model_impl), kind)
    assert isinstance(read_shape(build_config("LlamaForCausalLM", hidden_act="gelu"), "auto"), TransformersConfig)
    with pytest.raises(ModelLoadError, match="hidden_act='gelu' is not supported"):
        read_shape(build_config("LlamaForCausalLM", hidden_act="gelu"), "pagoda")
    assert isinstance(read_shape(build_config(GRANITE), "auto"), ModelConfig)
    with pytest.raises(ModelLoadError, match="'CohereForCausalLM' is not supported; supported: .*Gemma2ForCausalLM"):
        read_shape(build_config("CohereForCausalLM"), "pagoda")
    with pytest.raises(ConfigError, match="model_impl='vllm' is unknown; choose one of auto, pagoda, transformers"):
        EngineConfig(model="m", model_impl="vllm")


@pytest.mark.parametrize(
    ("options", "remedy"), [({"tensor_parallel_size": 2}, "set 1"), ({"quantization": "int8"}, "leave it out")]
)
def test_a_refusal_says_why_our_own_decoder_does_not_compute_the_model(
    options: dict[str, Any], remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        shape = read_shape(build_config("Glm4ForCausalLM", hidden_act="gelu"), "auto")
    why = "hidden_act='gelu' is not supported; supported: silu, gelu_pytorch_tanh"
    assert f"does not compute Glm4ForCausalLM with this config.json: {why}" in caplog.text
    with pytest.raises(ConfigError, match=f"because our own decoder does not: {re.escape(why)}; {remedy}"):
        shape.check_options(max_model_len=9, **{"tensor_parallel_size": 1, "quantization": None} | options)


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 0}, {"num_experts_per_tok": 5}])
def test_a_wrong_value_is_not_left_to_the_modules_of_transformers(changes: dict[str, Any]) -> None:
    config = build_config("Qwen3MoeForCausalLM")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelLoadError, match="; correct config.json"):
        read_shape(config, "auto")


# --- options of a config --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True, which is not"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "type 'chunked_attention'"),
        ("GPT2LMHeadModel", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
    ],
)
def test_an_option_that_was_not_proven_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        shape_of(architecture, **options)


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}


def test_longrope_is_refused_beyond_the_context_in_which_requests_cannot_change_each_other() -> None:
    shape = shape_of("Phi3ForCausalLM", rope_parameters=LONGROPE, original_max_position_embeddings=32)
    options: dict[str, Any] = {"tensor_parallel_size": 1, "quantization": None}
    shape.check_options(max_model_len=32, **options)
    with pytest.raises(ConfigError, match="max_model_len=33 exceeds the 32 positions that LongRoPE .*; set 32 or less"):
        shape.check_options(max_model_len=33, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported for 'GPT2LMHeadModel', .*; set 1"),
        ({"quantization": "int8"}, "quantization='int8' is not supported for 'GPT2LMHeadModel', .*; leave it out"),
    ],
)
def test_options_of_our_own_decoder_are_refused(zoo: Zoo, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelWorker(EngineConfig(model=zoo("GPT2LMHeadModel").path, device="cpu", **options))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_not_made_up(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        ModelLoadError,
        match=r"does not fit its config.json: 'model\.layers\.1\.mlp\.up_proj\.weight' is missing; download",
    ):
        load(checkpoint)


def test_a_tensor_too_many_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.extra": torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.0\.extra' of '.*\.safetensors' is unexpected; download"):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=41)
    with pytest.raises(
        ModelLoadError,
        match=r"0\.mlp\.down_proj\.weight' of '.*' has shape \[32, 40\] instead of \[32, 41\] and 5 more;",
    ):
        load(checkpoint)


def test_a_weight_that_is_not_finite_is_named(checkpoint: Path) -> None:
    file, name = checkpoint / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name][-1, 0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    at = [len(weights[name]) - 1, 0]
    message = f"'{name}' of '{file}' has 1 weights (nan at {at} for one) that are not finite; download the file"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load(checkpoint)


def test_weights_beyond_the_range_of_the_dtype_are_named(checkpoint: Path) -> None:
    file, name = checkpoint / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    weights[name][0, 1] = -1e6
    save_file(weights, file, {"format": "pt"})
    message = f"'{name}' of '{file}' has 1 weights (-1000000.0 at [0, 1] for one) that are too large for float16; set"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load(checkpoint, torch.float16)


def test_a_config_of_a_much_larger_model_is_refused_before_that_is_allocated(checkpoint: Path) -> None:
    edit_config(checkpoint, vocab_size=2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = r"'lm_head\.weight' of .* has shape \[120, 32\] instead of \[16777216, 32\] and 1 more;"
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "Qwen3MoeForCausalLM", "DbrxForCausalLM"])
def test_nothing_is_read_before_the_headers_are_compared(
    zoo: Zoo, tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts too, which transformers joins or splits."""
    good = load_file(Path(zoo(architecture).path) / "model.safetensors")
    monkeypatch.setattr("engine.models.checkpoint.files.tensor_files.TensorFiles.read_into", None)
    monkeypatch.setattr("engine.models.checkpoint.files.tensor_files.TensorFiles.map", None)
    name = min(name for name in good if ".1." in name and re.search("experts|mlp", name) and good[name].dim() > 1)
    damages: list[tuple[dict[str, torch.Tensor], str]] = [
        ({}, "is missing|cannot be joined|has shape"),
        ({name: good[name][..., :-1].contiguous()}, "has shape|cannot be joined|is missing"),
        (
            {name: good[name].to(torch.int8)},
            "has the dtype I8, and with the tensors beside it is not a weight of a known format; give",
        ),
        ({name: good[name], "model.layers.0.extra": torch.zeros(3)}, "is unexpected"),
    ]
    for damaged, message in damages:
        path = Path(shutil.copytree(zoo(architecture).path, tmp_path / "copy", dirs_exist_ok=True))
        rest = {other: weight for other, weight in good.items() if other != name}
        save_file(rest | damaged, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelLoadError, match=message):
            load(path)
    with pytest.raises(ModelLoadError, match="'NoneType' object is not callable"):  # and now it would be read
        load(zoo(architecture).path)


def test_a_tied_head_may_be_stored_instead_of_the_embedding(tmp_path: Path) -> None:
    path = Path(save_checkpoint(build_model("LlamaForCausalLM", tie_word_embeddings=True), tmp_path))
    weights = load_file(path / "model.safetensors")
    expected = load(path)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    tokens = torch.arange(3)
    hidden = torch.randn(3, 32)
    assert torch.equal(load(path).compute_logits(hidden, tokens), expected.compute_logits(hidden, tokens))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_only(
    zoo: Zoo, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zoo(GRANITE).path
    config = TransformersConfig.from_hf(load_hf_config(path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    for show_progress in (False, True):
        load_transformers_decoder(
            path,
            config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            parallel=TensorParallel(),
            show_progress=show_progress,
        )
        assert ("Loading weights" in capsys.readouterr().err) == (is_terminal and show_progress)


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is pickled"):
        load(checkpoint)


def test_an_architecture_that_is_not_that_of_the_model_type_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, architectures=["OlmoForCausalLM"])
    with pytest.raises(ModelLoadError, match="names the architecture 'OlmoForCausalLM', but .* 'GraniteForCausalLM'"):
        load(checkpoint)

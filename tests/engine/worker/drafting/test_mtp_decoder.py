"""Layers of multi-token prediction: those that are not there or not computed are refused, and what they take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelLoadError
from engine.kv.layer_cache import HiddenState, KeyValue, PrefixMark
from engine.kv.tiers.model_digest import model_digest
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.observability import metrics as m
from engine.options.speculative_config import SpeculativeConfig
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.capacity import estimate_capacity
from engine.worker.drafting.mtp_decoder import MtpDecoder
from kernels.attention.select import select_backend
from kernels.cpu.library import library
from tests.engine.conftest import SavedModel
from tests.engine.models.decoder.latent.latent_families import save_latent_model
from tests.engine.models.gguf import converted
from tests.engine.models.mtp.mtp_families import MTP_FAMILIES, MtpOracle
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.observability.test_metrics import RecordingSink
from tests.engine.oracle import make_llm, run

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

SPECULATION = {"method": "mtp", "num_speculative_tokens": 2}
OTHERS = "; choose ngram, suffix or draft_model"


def refusal(path: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        make_llm(path, speculative_config=SPECULATION, **options)
    message = str(refused.value)
    assert message.startswith("speculative_config.method='mtp' ")
    assert message.endswith(OTHERS)
    return message.removeprefix("speculative_config.method='mtp' ").removesuffix(OTHERS)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> str:
    return MtpOracle(MTP_FAMILIES["mimo"]).save(tmp_path_factory.mktemp("mimo"))


def with_changed_weights(path: str, to: Path, **changes: torch.Tensor | None) -> str:
    """Copy a checkpoint; of tensors that are None those whose names begin so are left out."""
    weights = load_file(Path(path) / "model.safetensors")
    for name, weight in changes.items():
        weights = {other: kept for other, kept in weights.items() if not other.startswith(name)}
        if weight is not None:
            weights[name] = weight
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((Path(path) / "config.json").read_text())
    return str(to)


def test_a_family_without_such_layers(qwen3: SavedModel) -> None:
    assert refusal(qwen3.path) == "does not support the layers of 'Qwen3ForCausalLM'"


def test_layers_that_read_chosen_tokens(tmp_path: Path) -> None:
    path = save_latent_model("deepseek-v3.2", tmp_path)[1]
    assert refusal(path) == "does not support the layers of 'DeepseekV32ForCausalLM'"


def test_a_checkpoint_without_the_layer(mimo: str, tmp_path: Path) -> None:
    path = with_changed_weights(mimo, tmp_path, **{"model.mtp_layers.": None})
    assert refusal(path) == f"needs a checkpoint with one MTP layer, and '{path}' has none"


def test_a_checkpoint_with_two_layers(mimo: str, tmp_path: Path) -> None:
    path = with_changed_weights(mimo, tmp_path, **{"model.mtp_layers.1.input_proj.weight": torch.zeros(2)})
    assert refusal(path) == f"needs a checkpoint with one MTP layer, and '{path}' has 2"


def test_modules_of_transformers(mimo: str, qwen3: SavedModel) -> None:
    expected = "needs our own decoder, and transformers' modules compute 'Qwen3ForCausalLM'"
    assert refusal(qwen3.path, model_impl="transformers") == expected


def test_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    converted.write_gguf(converted.build_model("qwen2"), "qwen2", path)
    assert refusal(str(path)) == "needs a checkpoint of safetensors, and the model is a GGUF file"


def test_gpus(mimo: str) -> None:
    config = EngineConfig(model=mimo, speculative_config=SPECULATION, skip_tokenizer_init=True)
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"method='mtp' runs on CPUs, and the device is cuda:0; choose ngram"):
        MtpDecoder(
            config,
            ModelConfig.from_hf(load_hf_config(mimo)),
            dtype=torch.bfloat16,
            device=torch.device("cuda:0"),
            backend=select_backend(cpu, torch.float32, "auto", frozenset()),
            max_model_len=64,
        )


def test_a_dtype_without_c_kernels(mimo: str) -> None:
    message = refusal(mimo, dtype="float16")
    assert message == "needs the C kernels, which cannot compute this model here"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "method='mtp' needs tensor_parallel_size=1; choose ngram or suffix"),
        ({"speculative_config": SPECULATION | {"model": "m"}}, "model='m' is an option of method 'draft_model'"),
        ({"speculative_config": SPECULATION | {"method": "mpt"}}, "method='mpt' is unknown"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options("model", {"speculative_config": SPECULATION} | options)


def test_one_token_is_drafted_unless_more_are_asked_for() -> None:
    assert SpeculativeConfig.from_options({"method": "mtp"}).num_speculative_tokens == 1


def test_a_layer_that_lacks_a_weight(mimo: str, tmp_path: Path) -> None:
    path = with_changed_weights(mimo, tmp_path, **{"model.mtp_layers.0.final_layernorm.weight": None})
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'model\.mtp_layers\.0\.final_layernorm\.weight'"):
        make_llm(path, speculative_config=SPECULATION)


def test_a_layer_that_is_not_finite(mimo: str, tmp_path: Path) -> None:
    name = "model.mtp_layers.0.input_proj.weight"
    weight = load_file(Path(mimo) / "model.safetensors")[name]
    weight[3, 5] = torch.nan
    path = with_changed_weights(mimo, tmp_path, **{name: weight})
    with pytest.raises(ModelLoadError, match=r"input_proj\.weight' of .* not finite"):
        make_llm(path, speculative_config=SPECULATION)


def test_what_it_takes_of_each_block(mimo: str) -> None:
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": "3MiB"}
    config = EngineConfig.from_options(mimo, {**options, "speculative_config": SPECULATION})
    capacity, without = estimate_capacity(config), estimate_capacity(EngineConfig.from_options(mimo, options))
    engine = Engine.from_config(config)
    assert capacity.num_blocks == engine.info.num_blocks
    assert capacity.kv_bytes == engine.runner.workers.local.kv_cache.num_bytes
    model = ModelConfig.from_hf(load_hf_config(mimo))
    heads = KeyValue(model.num_kv_heads, model.head_dim, model.head_dim)
    added = (heads, HiddenState(model.hidden_size), PrefixMark(4))
    assert engine.runner.workers.local.shard.layer_caches[-3:] == added
    assert capacity.bytes_per_token is not None
    assert without.bytes_per_token is not None
    assert capacity.bytes_per_token - without.bytes_per_token == 4 * sum(cache.elements_per_token for cache in added)
    digests = {model_digest(replace(config, speculative_config=other), engine.info) for other in (None, SPECULATION)}
    assert len(digests) == 2, "pages with and without hidden states are exchanged"


def test_its_tokens_are_counted_by_its_name(tmp_path: Path) -> None:
    oracle, sink = MtpOracle(MTP_FAMILIES["mimo"]), RecordingSink()
    oracle.let_agree()
    options = {"speculative_config": SPECULATION, "dtype": "float32", "device": "cpu", "kv_cache_memory": "2MiB"}
    options |= {"skip_tokenizer_init": True, "max_decode_slowdown": None}
    engine = Engine.from_config(EngineConfig.from_options(oracle.save(tmp_path), options), sink)
    engine.add_request(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=40, seed=1, ignore_eos=True)))
    steps = 0
    while engine.has_unfinished:
        steps += 1
        engine.step()
    accepted = sink.counters[m.ACCEPTED_TOKENS, "mtp"]
    assert steps + accepted == 40
    assert 5 < accepted < sink.counters[m.DRAFT_TOKENS, "mtp"]
    assert sink.counters[m.DRAFTING_SECONDS, "mtp"] > 0
    assert ("mtp",) in (m.DRAFT_TOKENS.known or ())


def test_a_multimodal_checkpoint_has_the_layer_beside_its_text_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 is published so."""
    oracle, drafts = MtpOracle(MTP_FAMILIES["qwen3.5"]), DraftCounter(monkeypatch)
    oracle.let_agree()
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    oracle.save(tmp_path)
    weights = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: weight
        for name, weight in load_file(file).items()
    }
    save_file(weights | {"model.visual.merger.norm.weight": torch.ones(2)}, file, {"format": "pt"})
    text = json.loads(config.read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    config.write_text(json.dumps(whole | {"tie_word_embeddings": text["tie_word_embeddings"]}))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(30, 60))]
    expected = [output.outputs[0].token_ids for output in run(make_llm(str(tmp_path)), prompts, params)]
    llm = make_llm(str(tmp_path), speculative_config=SPECULATION)
    assert [output.outputs[0].token_ids for output in run(llm, prompts, params)] == expected
    assert drafts.num_accepted > 5

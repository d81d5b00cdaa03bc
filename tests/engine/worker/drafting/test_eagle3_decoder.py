"""EAGLE-3 heads: those that do not fit or are not computed are refused by name, and what a head takes."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelLoadError, PagodaError
from engine.kv.layer_cache import HiddenState, KeyValue, PrefixMark
from engine.kv.tiers.model_digest import model_digest
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.eagle3.eagle3_config import read_eagle3_config
from engine.observability import metrics as m
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.capacity import estimate_capacity
from engine.worker.drafting.eagle3_decoder import Eagle3Decoder
from kernels.attention.select import select_backend
from kernels.cpu.library import library
from tests.engine.conftest import SavedModel
from tests.engine.models.checkpoint.damaged_checkpoints import little_memory
from tests.engine.models.decoder.gemma.gemma_families import save_gemma_model
from tests.engine.models.eagle3.eagle3_heads import HEAD_DIM, HEAD_FORMS, HEADS, Eagle3Oracle
from tests.engine.models.gguf import converted
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.observability.test_metrics import RecordingSink
from tests.engine.oracle import make_llm, run

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Eagle3Oracle, str]:
    oracle = Eagle3Oracle()
    return oracle, oracle.save(tmp_path_factory.mktemp("llama"))


def changed(
    saved: tuple[Eagle3Oracle, str],
    to: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
) -> dict[str, Any]:
    """Save a head with other fields and tensors, without those that are None; return the options."""
    oracle, path = saved
    fields = oracle.head_config() | (config or {})
    weights = oracle.head_tensors() | (tensors or {})
    (to / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, to / "model.safetensors", {"format": "pt"})
    return oracle.speculation(path, 2) | {"model": str(to)}


def refusal(
    saved: tuple[Eagle3Oracle, str], speculation: dict[str, Any], error: type[PagodaError] = ConfigError
) -> str:
    with pytest.raises(error) as refused:
        make_llm(saved[1], speculative_config=speculation)
    return str(refused.value).replace(speculation["model"], "HEAD")


GIVE = "; give an EAGLE-3 head of this model"
OF_HEAD = "speculative_config.model='HEAD' "


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 48, "target_hidden_size": 48}, "is for hidden states of 48 numbers (target_hidden_size), and"),
        ({"vocab_size": 300}, "is for a vocabulary of 300 tokens (vocab_size), and '{}' has 384" + GIVE),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            "reads before the layers [2, 4, 9], which must ascend,",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [4, 2, 3]},
            "reads before the layers [4, 2, 3], which must ascend,",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]},
            "reads before the layers [-1, 2, 3], which must ascend,",
        ),
        ({"num_hidden_layers": 2}, "has 2 layers (num_hidden_layers); give a head of one layer"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "is an EAGLE-1 or EAGLE-2 head, not of EAGLE-3" + GIVE),
        ({"architectures": ["EAGLEModel"]}, "is an EAGLE-1 or EAGLE-2 head, not of EAGLE-3" + GIVE),
        ({"speculators_model_type": "eagle"}, "is an EAGLE-1 or EAGLE-2 head, not of EAGLE-3" + GIVE),
        ({"speculators_model_type": "peagle"}, "is a head for parallel drafting (P-EAGLE), not of EAGLE-3" + GIVE),
        ({"architectures": ["MedusaModel"]}, "is of type 'MedusaModel', not of EAGLE-3" + GIVE),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "reads the last hidden state alone (use_aux_hidden_state",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised; give it in bf16, fp16 or fp32; quantization"),
        ({"model_type": "mixtral"}, "has a layer of model_type 'mixtral'; supported: llama, qwen3; give another head"),
    ],
)
def test_heads_that_do_not_fit(
    config: dict[str, Any], message: str, saved: tuple[Eagle3Oracle, str], tmp_path: Path
) -> None:
    assert refusal(saved, changed(saved, tmp_path, config)).startswith(OF_HEAD + message.replace("{}", saved[1]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"draft_vocab_size": "many"}, "draft_vocab_size='many' is not a positive integer"),
        ({"norm_before_fc": "yes"}, "norm_before_fc='yes' is not true or false"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "eagle_aux_hidden_state_layer_ids='2' is not a list of integers"),
        ({"hidden_size": None}, "hidden_size=None is not given"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config=None is not a map"),
        ({"num_attention_heads": -1}, "num_attention_heads=-1 is not an integer from 1 to 4096"),
    ],
)
def test_malformed_configs(
    config: dict[str, Any], message: str, saved: tuple[Eagle3Oracle, str], tmp_path: Path
) -> None:
    found = refusal(saved, changed(saved, tmp_path, config), ModelLoadError)
    assert found == f"config.json of 'HEAD' could not be read: {message}; correct it, or download it again"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"fc.weight": torch.zeros(96, 192)},
            OF_HEAD + "is an EAGLE-1 or EAGLE-2 head: its 'fc.weight' reads",
        ),
        (
            {"fc.weight": None},
            OF_HEAD + "has no tensor 'fc.weight', so it is not a head; choose draft_model",
        ),
        (
            {"fc.weight": torch.zeros(96, 96)},
            "'fc.weight' of 'HEAD/model.safetensors' has shape [96, 96], but its",
        ),
        ({"fc.weight": torch.tensor(1.0)}, "'fc.weight' of 'HEAD/model.safetensors' has shape [], but its"),
        (
            {"lm_head.weight": None},
            "checkpoint 'HEAD' lacks the tensor 'lm_head.weight', which its config.json",
        ),
        ({"midlayer.hidden_norm.weight": None}, "checkpoint 'HEAD' lacks the tensor 'midlayer.hidden_norm.weight'"),
        ({"d2t": None}, "checkpoint 'HEAD' lacks the tensor 'd2t', which says which 288 of 384 tokens it drafts"),
        ({"d2t": torch.full((288,), 200)}, "'d2t' of 'HEAD' names the token 384 of 384;"),
        ({"d2t": -torch.arange(288)}, "'d2t' of 'HEAD' names the token 0 twice;"),
        ({"d2t": torch.zeros(3).long()}, "'d2t' of 'HEAD/model.safetensors' is I64 of the shape [3], and integers of"),
        ({"d2t": torch.zeros(288)}, "'d2t' of 'HEAD/model.safetensors' is F32 of the shape [288], and integers of"),
        ({"norm.weight": torch.full((96,), torch.nan)}, "'norm.weight' of 'HEAD"),
    ],
)
def test_wrong_tensors(
    tensors: dict[str, torch.Tensor | None], message: str, saved: tuple[Eagle3Oracle, str], tmp_path: Path
) -> None:
    error = ConfigError if message.startswith(OF_HEAD) else ModelLoadError
    assert refusal(saved, changed(saved, tmp_path, {}, tensors), error).startswith(message)


def test_sizes_that_the_file_does_not_have_are_refused_before_the_model_is_loaded(
    saved: tuple[Eagle3Oracle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eagle3Decoder, "load", lambda *_: pytest.fail("the model was loaded"))
    wide = {"hidden_size": 2**18, "num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 64}
    speculation = changed(saved, tmp_path, {**wide, "intermediate_size": 2**20, "target_hidden_size": 96})
    found = refusal(saved, speculation, ModelLoadError)
    assert found.startswith(
        "'fc.weight' of 'HEAD/model.safetensors' has shape [96, 288], but its config.json says [262"
    )


def test_no_memory_is_taken_for_sizes_that_the_file_does_not_have(
    saved: tuple[Eagle3Oracle, str], tmp_path: Path
) -> None:
    speculation = changed(saved, tmp_path, {"intermediate_size": 2**20})
    with little_memory():
        found = refusal(saved, speculation, ModelLoadError)
    assert found.startswith("'midlayer.mlp.gate_proj.weight' of 'HEAD/model.safetensors' has shape [")


def test_a_head_without_default_layers(saved: tuple[Eagle3Oracle, str], tmp_path: Path) -> None:
    small = Eagle3Oracle(replace(HEAD_FORMS["eagle"], options={"num_hidden_layers": 6}))
    path = small.save(tmp_path)
    message = refusal((small, path), small.speculation(path, 2))
    assert message == OF_HEAD + "names no layers, and of 6 there are no three by default" + GIVE


def test_pickled_files(saved: tuple[Eagle3Oracle, str], tmp_path: Path) -> None:
    speculation = changed(saved, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = refusal(saved, speculation, ModelLoadError)
    assert message.endswith("pytorch_model.bin is pickled, which can run code: convert it to safetensors")


def test_a_head_that_is_not_there(saved: tuple[Eagle3Oracle, str], tmp_path: Path) -> None:
    speculation = changed(saved, tmp_path)
    (tmp_path / "config.json").unlink()
    assert refusal(saved, speculation).startswith(OF_HEAD + "has no config.json; ")
    message = refusal(saved, speculation | {"model": f"{tmp_path}/none"})
    assert message == OF_HEAD + "is not a directory; give the directory of an EAGLE-3 head"


@pytest.mark.parametrize(
    ("speculation", "options", "message"),
    [
        ({}, {"tensor_parallel_size": 2}, "method='eagle3' needs tensor_parallel_size=1; choose ngram or suffix"),
        ({"model": None}, {}, "speculative_config.model is missing; give the checkpoint of the EAGLE-3 head"),
        ({"prompt_lookup_max": 3}, {}, "prompt_lookup_max=3 is an option of method 'ngram', not of 'eagle3'"),
    ],
)
def test_bad_options_are_refused(speculation: dict[str, Any], options: dict[str, Any], message: str) -> None:
    head = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options("model", {"speculative_config": head | speculation, **options})


def test_models_that_are_not_computed_so(saved: tuple[Eagle3Oracle, str], qwen3: SavedModel, tmp_path: Path) -> None:
    oracle, path = saved
    speculation = oracle.speculation(path, 2)
    start = "speculative_config.method='eagle3' "
    for model, options, problem in (
        (
            qwen3.path,
            {"model_impl": "transformers"},
            "needs our own decoder, and transformers' modules compute 'Qwen",
        ),
        (path, {"dtype": "float16"}, "needs the C kernels, which cannot compute this model, or the head, here; choose"),
        (
            save_gemma_model("gemma-3n-e4b", tmp_path)[1],
            {},
            "does not support 'Gemma3nForCausalLM', which has",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            make_llm(model, speculative_config=speculation, **options)
        assert str(refused.value).startswith(start + problem)


def test_gpus(saved: tuple[Eagle3Oracle, str]) -> None:
    oracle, path = saved
    config = EngineConfig(model=path, speculative_config=oracle.speculation(path, 2), skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"method='eagle3' runs on CPUs, and the device is cuda:0; choose ngram"):
        Eagle3Decoder(
            config,
            ModelConfig.from_hf(load_hf_config(path)),
            dtype=torch.bfloat16,
            device=torch.device("cuda:0"),
            backend=select_backend(torch.device("cpu"), torch.float32, "auto", frozenset()),
            max_model_len=64,
        )


def test_what_it_takes_of_each_block(saved: tuple[Eagle3Oracle, str]) -> None:
    oracle, path = saved
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": "3MiB"}
    speculation = oracle.speculation(path, 2)
    config = EngineConfig.from_options(path, {**options, "speculative_config": speculation})
    capacity, without = estimate_capacity(config), estimate_capacity(EngineConfig.from_options(path, options))
    engine = Engine.from_config(config)
    assert capacity.num_blocks == engine.info.num_blocks
    assert capacity.kv_bytes == engine.runner.workers.local.kv_cache.num_bytes
    added = (KeyValue(HEADS, HEAD_DIM, HEAD_DIM), HiddenState(96), PrefixMark(4))
    assert engine.runner.workers.local.shard.layer_caches[-3:] == added
    assert capacity.bytes_per_token is not None
    assert without.bytes_per_token is not None
    assert capacity.bytes_per_token - without.bytes_per_token == 4 * sum(cache.elements_per_token for cache in added)
    digests = {model_digest(replace(config, speculative_config=other), engine.info) for other in (None, speculation)}
    assert len(digests) == 2, "pages with and without hidden states are exchanged"


def test_its_tokens_are_counted_by_its_name(tmp_path: Path) -> None:
    oracle, sink = Eagle3Oracle(HEAD_FORMS["two layers"]), RecordingSink()
    oracle.let_agree()
    path = oracle.save(tmp_path)
    options = {"speculative_config": oracle.speculation(path, 2), "dtype": "float32", "device": "cpu"}
    options |= {"skip_tokenizer_init": True, "max_decode_slowdown": None, "kv_cache_memory": "2MiB"}
    engine = Engine.from_config(EngineConfig.from_options(path, options), sink)
    engine.add_request(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=40, seed=1, ignore_eos=True)))
    steps = 0
    while engine.has_unfinished:
        steps += 1
        engine.step()
    accepted = sink.counters[m.ACCEPTED_TOKENS, "eagle3"]
    assert steps + accepted == 40
    assert 5 < accepted < sink.counters[m.DRAFT_TOKENS, "eagle3"]
    assert sink.counters[m.DRAFTING_SECONDS, "eagle3"] > 0
    assert ("eagle3",) in (m.DRAFT_TOKENS.known or ())


def test_a_gguf_model_has_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, drafts = Eagle3Oracle(replace(HEAD_FORMS["two layers"], family="qwen3")), DraftCounter(monkeypatch)
    saved = oracle.save(tmp_path / "saved")
    file = str(tmp_path / "model.gguf")
    converted.write_gguf(oracle.model, "qwen3", Path(file))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(30, 60))]
    expected = [output.outputs[0].token_ids for output in run(make_llm(file), prompts, params)]
    llm = make_llm(file, speculative_config=oracle.speculation(saved, 2))
    assert [output.outputs[0].token_ids for output in run(llm, prompts, params)] == expected
    assert drafts.num_drafted > 10


def test_a_grammar_of_tokens_that_the_head_lacks(tmp_path: Path) -> None:
    """Nothing can be drafted then, and the answer is the same."""
    oracle = Eagle3Oracle(HEAD_FORMS["eagle"])
    path = oracle.save(tmp_path)
    lacking = sorted(set(range(3, 384)) - set(oracle.token_ids.tolist()))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, allowed_token_ids=lacking[:9])
    expected = [output.outputs[0].token_ids for output in run(make_llm(path), [[5, 6, 7]], params)]
    llm = make_llm(path, speculative_config=oracle.speculation(path, 3))
    assert [output.outputs[0].token_ids for output in run(llm, [[5, 6, 7]], params)] == expected


# --- damage ---------------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-3, 2**40), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.sampled_from(["eagle_aux_hidden_state_layer_ids", "rope_type", "factor", "x"]), st.integers()),
)


@pytest.mark.parametrize("name", ["eagle", "speculators"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_damaged_configs_are_read_or_refused(name: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    config = deepcopy(OF_FORMS[name].head_config())
    layer = config.get("transformer_layer_config", config)
    for fields in (config, layer):
        names = [*fields, "rope_scaling", "eagle_config", "norm_output", "target_hidden_size", "norm_before_residual"]
        for field in data.draw(st.lists(st.sampled_from(names), max_size=2)):
            fields[field] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    try:
        read_eagle3_config(str(path)).aux_layers_of(8)
    except PagodaError:
        return


OF_FORMS = {name: Eagle3Oracle(HEAD_FORMS[name]) for name in ("eagle", "speculators")}


@given(position=st.integers(0, 2**20), size=st.integers(1, 64), is_cut=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_damaged_weights_are_loaded_or_refused(
    position: int, size: int, is_cut: bool, saved: tuple[Eagle3Oracle, str], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged weights"
    path.mkdir(exist_ok=True)
    speculation = changed(saved, path)
    stored = (path / "model.safetensors").read_bytes()
    at = position % min(len(stored), 4096)  # the header, and some of the weights
    damaged = stored[:at] if is_cut else stored[:at] + bytes(size) + stored[at + size :]
    (path / "model.safetensors").write_bytes(damaged)
    try:
        llm = make_llm(saved[1], speculative_config=speculation)
    except PagodaError:
        return
    run(llm, [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    llm.engine.close()

"""The config that GGUF metadata stands for is that of the model which was converted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.models.config.files.hf_config import load_hf_config, read_with_transformers
from engine.models.config.implementation import read_shape
from engine.models.config.model_config import ModelConfig
from engine.models.config.transformers_config import TransformersConfig
from engine.models.config.values.limits import require_plausible
from engine.models.decoder.rope import rope_tables
from engine.models.gguf.config import gguf_config
from engine.models.gguf.file import open_gguf
from engine.text.tokenizer import Tokenizer
from tests.engine.models.gguf.conftest import Converted
from tests.engine.models.gguf.converted import ARCHITECTURES
from tests.engine.models.gguf.metadata import write_metadata

BY_TRANSFORMERS = ("gpt-oss", "ministral3", "glm4moe", "glm4v-moe", "command-r", "command-r-plus", "cohere2")


# Other architectures than the file's, which has no name for them.
READ_AS_ANOTHER = ("deepseek2-glm",)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in READ_AS_ANOTHER])
def test_is_the_config_of_the_converted_model(converted: Converted, name: str) -> None:
    model, path = converted(name)
    read, original = load_hf_config(path), model.config
    ours, theirs = read_shape(read, "auto"), read_shape(original, "auto")
    assert ours.dtype in (torch.bfloat16, torch.float16, torch.float32)
    unknown: dict[str, Any] = {"dtype": None}
    if name == "mamba2":  # whose file has no use for these
        unknown |= {"max_position_embeddings": 0, "intermediate_size": 0}
    assert replace(ours, **unknown) == replace(theirs, **unknown)
    assert type(ours) is (TransformersConfig if name in BY_TRANSFORMERS else ModelConfig)
    if isinstance(ours, ModelConfig):
        tables = [rope_tables(config, ours.rope, ours.rope_widths, 512) for config in (read, original)]
        torch.testing.assert_close(*tables, rtol=0, atol=1e-6 if name == "llama" else 0)


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_transformers_computes_a_model_with_it(converted: Converted, name: str) -> None:
    model, path = converted(name)
    ours, theirs = read_with_transformers(path).to_dict(), model.config.to_dict()
    different = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    if model.config.model_type.startswith("cohere"):  # has other norms
        different -= {"rms_norm_eps"}
    assert different <= {"dtype", "transformers_version", "_attn_implementation", "pad_token_id", "bos_token_id",
                         "eos_token_id", "moe_intermediate_size", "num_experts"}  # fmt: skip


def test_the_largest_gemmas_have_another_scale(tmp_path: Path) -> None:
    for architecture, layers, scalar in (("gemma2", 46, 128), ("gemma2", 42, 256), ("gemma3", 62, 128)):
        path = tmp_path / f"{architecture}-{layers}.gguf"
        write_metadata(path, architecture, layers=layers, key_length=256)
        assert load_hf_config(path).query_pre_attn_scalar == scalar


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", torch.float16), ("gemma2", torch.bfloat16)])
def test_float16_is_kept_where_the_hidden_states_fit_it(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    write_metadata(path := tmp_path / "a.gguf", architecture)
    assert load_hf_config(path).dtype == dtype


def test_stop_tokens_and_sampling_defaults(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "a", "<end_of_turn>", "</s>"]
    types = [3, 3, 3, 1, 3, 1]  # the last is a text like any other

    def add(writer: Any) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_eos_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    write_metadata(path := tmp_path / "a.gguf", "llama", add=add)
    defaults = GenerationDefaults.load(path, load_hf_config(path), with_tokenizer=True)
    assert defaults.eos_token_ids == (1, 4)
    assert defaults.sampling == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize("kind", [1, 4])  # normal, user-defined: as in published files of Gemma
@pytest.mark.parametrize("end", ["<end_of_turn>", "<turn|>"])
def test_a_turn_ends_although_its_token_is_not_marked(tmp_path: Path, kind: int, end: str) -> None:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<eos>", "</s>", end, "a"])
        writer.add_token_types([3, 1, kind, 1])
        writer.add_token_scores([0.0] * 4)
        writer.add_eos_token_id(0)
        writer.add_add_space_prefix(False)

    write_metadata(path := tmp_path / "a.gguf", "gemma3", add=add)
    assert load_hf_config(path).eos_token_id == [0, 2]
    tokenizer = Tokenizer(path)
    assert 2 in tokenizer.special_ids
    assert tokenizer.encode(f"a{end}a", add_special_tokens=False) == [3, 2, 3]


def test_the_end_of_a_harmony_message_is_no_stop_token(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_token_list(["<|return|>", "<|end|>", "<|call|>", "<|im_end|>"])
        writer.add_token_types([3, 3, 3, 3])
        writer.add_eot_token_id(2)
        writer.add_eos_token_id(0)

    write_metadata(path := tmp_path / "a.gguf", "llama", add=add)
    assert load_hf_config(path).eos_token_id == [0, 2, 3]


_GEMMA4: dict[str, Any] = {
    "block_count": 2,
    "attention.sliding_window_pattern": [True, False],
    "attention.key_length_swa": 32,
}
_DEEPSEEK: dict[str, Any] = {
    "rope.dimension_count": 32,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "expert_count": 8,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another architecture": ("mamba", {}, "architecture 'mamba', which is not read from GGUF; supported: llama"),
    "towers": ("clip", {}, "has a model's towers for images or sound, not the model; give the GGUF file"),
    "no layers": ("llama", {"block_count": None}, "it has no llama.block_count; download"),
    "heads by layer": ("llama", {"attention.head_count_kv": [1, 2]}, r"head_count_kv=\[1, 2\] differs between layers"),
    "no heads": ("llama", {"attention.head_count": 0}, "llama.attention.head_count=0 is not an integer from 1"),
    "a text": ("llama", {"context_length": "long"}, "llama.context_length='long' is not an integer from 1"),
    "other values": ("llama", {"attention.value_length": 32}, "keys and values differ in size"),
    "partial RoPE": ("llama", {"rope.dimension_count": 32}, "is not the head's 64 elements"),
    "a scaling": ("qwen2", {"rope.scaling.type": "warp"}, "scaling.type='warp' is not supported"),
    "one token": (
        "qwen2",
        {"add": lambda writer: writer.add_uint32("tokenizer.ggml.tokens", 1)},
        "tokens=1 is not a list",
    ),
    "no base": ("llama", {"rope.freq_base": 0.0}, "llama.rope.freq_base=0.0 is not a positive number"),
    "half a scaling": ("qwen2", {"rope.scaling.type": "linear"}, "it has no qwen2.rope.scaling.factor"),
    "kinds of attention": (
        "granitehybrid",
        {"block_count": 3, "attention.head_count_kv": [0, 1, 2]},
        "head_count_kv differs between layers with attention",
    ),
    "a head too few": (
        "lfm2",
        {"block_count": 3, "attention.head_count_kv": [0, 1]},
        r"head_count_kv=\[0, 1\] is not an integer from 0 for each of 3 layers",
    ),
    "a Bamba": ("granitehybrid", {"rope.scaling.finetuned": True}, "it is a Bamba, whose attention rotates"),
    "heads of a state": (
        "mamba2",
        {"ssm.inner_size": 512, "ssm.time_step_rank": 7},
        "mamba2.ssm.inner_size=512 is not divided by its 7 heads",
    ),
    "an odd expansion": (
        "mamba2",
        {"ssm.inner_size": 300, "ssm.time_step_rank": 3, "ssm.state_size": 8, "ssm.conv_kernel": 4},
        "inner_size=300 is not a multiple of its 256 features",
    ),
    "windows of some layers": (
        "gemma4",
        {"block_count": 2, "attention.sliding_window_pattern": [True]},
        "sliding_window_pattern does not say of 2 layers which slide",
    ),
    "a last layer that slides": (
        "gemma4",
        _GEMMA4 | {"attention.sliding_window_pattern": [False, True]},
        "the last one not",
    ),
    "heads of one kind": (
        "gemma4",
        _GEMMA4
        | {
            "block_count": 3,
            "attention.sliding_window_pattern": [True, True, False],
            "attention.head_count_kv": [1, 2, 1],
        },
        "head_count_kv differs between layers of a kind",
    ),
    "no size of sliding heads": (
        "gemma4",
        _GEMMA4 | {"attention.key_length_swa": None},
        "it has no gemma4.attention.key_l",
    ),
    "other sliding values": (
        "gemma4",
        _GEMMA4 | {"attention.value_length_swa": 64},
        "value_length_swa is not the head's 32 elements",
    ),
    "no keys": (
        "gemma4",
        _GEMMA4 | {"attention.shared_kv_layers": 2**31},
        "shared_kv_layers=2147483648 leaves none of 2 layers",
    ),
    "a third width": ("gemma4", _GEMMA4 | {"feed_forward_length": [64, 96]}, "feed_forward_length differs between"),
    "no rotated elements": ("gemma4", _GEMMA4, "'rope_freqs.weight' does not say which elements are rotated"),
    "scores of experts": (
        "deepseek2",
        _DEEPSEEK | {"expert_gating_func": 3},
        "expert_gating_func=3 is not supported; only 1",
    ),
    "scores of GLM's experts": ("glm4moe", {"expert_gating_func": 1}, r"expert_gating_func is not 2 \(sigmoid\)"),
    "queries that grow": ("deepseek2", _DEEPSEEK | {"attention.temperature_scale": 0.1}, "it scales queries by their"),
    "keys that all rotate": (
        "deepseek2",
        _DEEPSEEK | {"attention.key_length_mla": 32},
        "keys of 32 elements are no longer than the 32 that RoPE rotates",
    ),
    "more than all elements": ("glm4", {"rope.dimension_count": 65}, "dimension_count=65 is more than the head's 64"),
    "no scale of logits": ("command-r", {"attention.layer_norm_epsilon": 1e-5}, "it has no command-r.logit_scale"),
    "an id": ("qwen2", {"block_count": 10**6}, "qwen2.block_count=1000000 is more than any model has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_metadata_is_refused(tmp_path: Path, case: str) -> None:
    architecture, others, message = REFUSED[case]
    write_metadata(path := tmp_path / "a.gguf", architecture, **others)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_hf_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("factors", [[1.0] * 16 + [2.0] * 16, [1e30] * 16 + [1.0] * 16, [1.0] * 31])
def test_frequencies_that_are_scaled_are_refused_in_gemma_4(tmp_path: Path, factors: list[float]) -> None:
    def add(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))

    write_metadata(path := tmp_path / "a.gguf", "gemma4", add=add, **_GEMMA4)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        load_hf_config(path)


def test_unknown_factors_of_frequencies_are_refused(tmp_path: Path) -> None:
    def add(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 32, dtype=np.float32))

    write_metadata(path := tmp_path / "a.gguf", "llama", add=add)
    with pytest.raises(ModelLoadError, match="'rope_freqs.weight' are not those of Llama 3's scaling"):
        load_hf_config(path)


@pytest.mark.parametrize(("experts", "gating", "groups"), [(256, 2, (8, 4)), (160, 1, (8, 3)), (64, 1, (1, 1))])
def test_groups_of_experts_that_older_files_do_not_name(
    experts: int, gating: int, groups: tuple[int, int], tmp_path: Path
) -> None:
    further = {"expert_gating_func": gating, "expert_used_count": 8, "expert_feed_forward_length": 64}
    further |= {"attention.kv_lora_rank": 64, "expert_count": experts}
    write_metadata(path := tmp_path / "a.gguf", "deepseek2", **_DEEPSEEK | further)
    config = gguf_config(open_gguf(path))
    assert (config["n_group"], config["topk_group"]) == groups
    assert config["architectures"] == ["DeepseekV3ForCausalLM" if gating == 2 else "DeepseekV2ForCausalLM"]


VALUES = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**6, 0.0, -1.0, math.inf, math.nan, 1e38, True, "", "yarn", "linear"]),
    st.lists(st.sampled_from([0, 1, True, 1.5, "a"]), max_size=3),
    st.none(),
)


FURTHER = [
    "ARCH.rope.scaling.type", "ARCH.rope.scaling.factor", "ARCH.rope.scaling.original_context_length",
    "ARCH.rope.dimension_count", "ARCH.attention.sliding_window_pattern", "ARCH.expert_count", "ARCH.expert_used_count",
    "ARCH.final_logit_softcapping", "ARCH.rope.freq_base_swa", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type", "ARCH.attention.shared_kv_layers",
]  # fmt: skip


@given(st.data())
def test_whatever_the_metadata_says_is_read_or_refused(converted: Converted, data: st.DataObject) -> None:
    file = open_gguf(converted(data.draw(st.sampled_from(sorted(ARCHITECTURES))))[1])
    architecture = file.metadata["general.architecture"]
    good: dict[str, Any] = dict(file.metadata)
    for key in data.draw(st.lists(st.sampled_from([*good, *FURTHER]), min_size=1, max_size=3)):
        good[key.replace("ARCH", architecture)] = data.draw(VALUES)
    metadata = {key: value for key, value in good.items() if value is not None}
    try:
        config = gguf_config(file._replace(path=Path("a.gguf"), metadata=metadata))
        require_plausible(config, "a.gguf")
    except ModelLoadError as error:
        if "a.gguf" not in str(error):
            raise
        return
    assert config["num_hidden_layers"] <= 512

"""Checkpoints of latent families as they are published, and configs that no such model has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from tests.engine.models.decoder.changed_models import TOLERANCE, load
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, YARN
from tests.engine.models.decoder.latent.test_logits import largest_error
from tests.engine.models.decoder.saved_models import Saved


def copy_with(saved: Saved, path: Path, **fields: Any) -> Path:
    """Copy a checkpoint with other fields in its config.json."""
    target = path / "changed"
    shutil.copytree(saved.path, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | fields))
    return target


def test_kimi_k2_is_published_with_code_of_its_own(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    own = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.X"}
    path = copy_with(saved("kimi-k2"), tmp_path, model_type="kimi_k2", auto_map=own)
    assert largest_error(load(str(path)), saved("kimi-k2")) < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.7-flash", "glm-5.2"])
def test_layers_that_predict_further_tokens_are_not_loaded(
    saved: Callable[[str], Saved], name: str, tmp_path: Path
) -> None:
    path = copy_with(saved(name), tmp_path, num_nextn_predict_layers=1)
    parts = ("eh_proj", "enorm", "self_attn.indexer.wk")
    further = {f"model.layers.3.{part}.weight": torch.ones(2, 2) for part in parts}
    file = path / "model.safetensors"
    save_file(load_file(file) | further, file, {"format": "pt"})
    assert largest_error(load(str(path)), saved(name)) < TOLERANCE
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"has 3 tensors that a .* does not, 'model\.layers\.3\.eh_proj\.weight'"):
        load(str(path))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a model without as many groups": ("deepseek-v3", {"topk_group": 5}, "topk_group=5 of n_group=4 groups of n_ro"),
    "groups of different sizes": ("deepseek-v3", {"n_group": 3}, "n_group=3 does not divide n_routed_experts=8"),
    "groups of one expert": ("deepseek-v3", {"n_group": 8, "topk_group": 4}, "topk_group=4 of n_group=8 groups"),
    "too few experts in groups": (
        "deepseek-v3",
        {"topk_group": 1},
        "num_experts_per_tok=3 is more than topk_group=1 of n_group=4 groups of n_routed_experts=8 have; correct",
    ),
    "layers between with experts": ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2, and only 1 is supported"),
    "V2 with normalised weights": ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True, and only False"),
    "V2 with another choice": ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc', and only 'greedy'"),
    "types of feed-forwards": ("glm-4.7-flash", {"mlp_layer_types": ["dense"]}, "does not say dense or sparse of each"),
    "a bias beside direct queries": ("youtu", {"attention_bias": True}, "attention_bias=true with q_lora_rank=null"),
    "no rank": ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank=0 is not an integer from 1"),
    "no shared experts' number": ("deepseek-v3", {"n_shared_experts": "two"}, "n_shared_experts='two' is not an int"),
    "part of the rotated elements": (
        "glm-4.7-flash",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 is not supported: RoPE has to rotate 16 elements",
    ),
    "further layers that are no number": ("deepseek-v3", {"num_nextn_predict_layers": [1]}, r"predict_layers=\[1\] is"),
    "an odd number of rotated elements": ("deepseek-v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim=15 must be even"),
    "a factor of YaRN that is no number": ("deepseek-v3", {"rope_parameters": YARN | {"factor": "4"}}, "factor='4' is"),
    "an amount of YaRN that is no number": (
        "deepseek-v2",
        {"rope_parameters": YARN | {"mscale_all_dim": [1]}},
        r"mscale_all_dim=\[1\] is not a finite number",
    ),
    "a part of heads that is no number": (
        "mistral-4",
        {"rope_parameters": YARN | {"partial_rotary_factor": "half"}},
        "partial_rotary_factor='half' is not supported",
    ),
    "heads without a size": ("mistral-4", {"head_dim": None}, "partial_rotary_factor=.* is not supported"),
    "a negative base of widths": ("minicpm3", {"dim_model_base": -32}, "dim_model_base=-32 is not a number from"),
    "no base of widths": ("minicpm3", {"dim_model_base": 0}, "dim_model_base=0 is not a number from"),
    "a factor of queries without a length": (
        "mistral-4",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
        "original_max_position_embeddings=None is not an integer",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_config_that_no_such_model_has_is_refused(saved: Callable[[str], Saved], wrong: str, tmp_path: Path) -> None:
    name, fields, message = REFUSED[wrong]
    path = copy_with(saved(name), tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(load_hf_config(path))


def test_frequencies_of_other_heads_are_not_taken(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """YaRN's are computed of head_dim, which need not be the number of elements that are rotated."""
    path = copy_with(saved("deepseek-v3"), tmp_path, head_dim=24)
    with pytest.raises(ModelLoadError, match="12 frequencies for 16 elements that are rotated.*; correct them"):
        load(str(path))


DENSE = [name for name, (_, options) in LATENT_FAMILIES.items() if "index_topk" not in options]


@pytest.mark.parametrize("name", DENSE)
def test_a_token_takes_one_vector_in_each_layer(saved: Callable[[str], Saved], name: str) -> None:
    config = ModelConfig.from_hf(load_hf_config(saved(name).path))
    for ranks in (1, 2, 4):
        caches = config.shard(ranks).layer_caches
        assert [cache.elements_per_token for cache in caches] == [32 + 16] * 3  # type: ignore[union-attr]

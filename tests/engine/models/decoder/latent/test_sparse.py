"""Sparse latent attention (DeepSeek V3.2, GLM-5) against transformers: no part of the choice of tokens can be left out.

The comparisons themselves are those of all families with latent attention, in test_logits.py, test_answers.py and
test_formats.py: their contexts are several times as long as the 6 or 8 tokens that a query attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelLoadError
from engine.kv.layer_cache import IndexKey, Latent
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder import indexer as decoder_indexer
from engine.models.decoder import loader
from engine.models.decoder.decoder import Decoder
from kernels.attention import indexer
from kernels.attention.indexer_inputs import IndexerInputs
from tests.engine.models.decoder.changed_models import TOLERANCE, Change, load
from tests.engine.models.decoder.latent.test_loading import copy_with
from tests.engine.models.decoder.latent.test_logits import largest_error
from tests.engine.models.decoder.saved_models import Saved


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute all of a model, as on other devices."""
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)


# --- planted errors -------------------------------------------------------------------------------------------------


def _index(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.latent is not None
        assert config.latent.index is not None
        return replace(config, latent=replace(config.latent, index=replace(config.latent.index, **changes)))

    return change


CONFIGS: dict[str, tuple[str, Change]] = {
    "one token too many": ("deepseek-v3.2", _index(top_k=9)),
    "one token too few": ("deepseek-v3.2", _index(top_k=7)),
    "one token too many, in GLM": ("glm-5", _index(top_k=7)),
    "all tokens": ("deepseek-v3.2", _index(top_k=1000)),
    "neighbours rotated, not halves": ("deepseek-v3.2", _index(rotation="neighbours")),
    "halves rotated, not neighbours": ("glm-5", _index(rotation="halves")),
    "the epsilon of keys": ("deepseek-v3.2", _index(norm_eps=0.3)),
}


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("planted", CONFIGS)
def test_a_feature_that_is_left_out_is_noticed(
    saved: Callable[[str], Saved], planted: str, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = CONFIGS[planted]
    if not in_c:
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    assert largest_error(load(saved(name).path, change), saved(name)) > 10 * TOLERANCE


def _own_choice(decoder: Decoder) -> None:
    decoder.layers[1].self_attn.indexer = decoder.layers[0].self_attn.indexer


def _choice_of_an_earlier_layer(decoder: Decoder) -> None:
    decoder.layers[2].self_attn.indexer = None


WEIGHTS: dict[str, tuple[str, Callable[[Decoder], object]]] = {
    "the bias of keys' norm": ("glm-5", lambda decoder: decoder.layers[0].self_attn.indexer.k_norm.bias.data.zero_()),
    "the weights of keys' norm": (
        "deepseek-v3.2",
        lambda decoder: decoder.layers[1].self_attn.indexer.k_norm.weight.data.fill_(1.0),
    ),
    "the weights of heads": (
        "deepseek-v3.2",
        lambda decoder: decoder.layers[0].self_attn.indexer.weights_proj.weight.data.abs_(),
    ),
    "a shared layer that chooses itself": ("glm-5.2", _own_choice),
    "a full layer that does not": ("glm-5.2", _choice_of_an_earlier_layer),
}


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("changed", WEIGHTS)
def test_a_weight_or_a_choice_that_is_exchanged_is_noticed(saved: Callable[[str], Saved], changed: str) -> None:
    name, change = WEIGHTS[changed]
    decoder = load(saved(name).path)
    change(decoder)
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


def _without_relu(inputs: IndexerInputs, row: int, keys: torch.Tensor) -> torch.Tensor:
    return inputs.weights[row] @ (inputs.query[row] @ keys.T)


def _of_one_head(inputs: IndexerInputs, row: int, keys: torch.Tensor) -> torch.Tensor:
    return inputs.weights[row, :1] @ (inputs.query[row, :1] @ keys.T).relu()


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("scores", [_without_relu, _of_one_head])
def test_other_scores_are_noticed(saved: Callable[[str], Saved], scores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(saved("deepseek-v3.2").path)
    monkeypatch.setattr(indexer, "_scores", scores)
    assert largest_error(decoder, saved("deepseek-v3.2")) > 10 * TOLERANCE


@pytest.mark.usefixtures("only_torch")
def test_a_choice_among_future_tokens_too_is_noticed(
    saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every query of a chunk chooses as if it were its last one, and future tokens are then left out."""
    decoder, right = load(saved("deepseek-v3.2").path), indexer.topk_slots

    def unmasked(inputs: IndexerInputs) -> torch.Tensor:
        visible, chosen = right(replace(inputs, top_k=1000)), right(inputs)
        metadata = inputs.metadata
        for start, end in zip(metadata.cu_seqlens_q[:-1].tolist(), metadata.cu_seqlens_q[1:].tolist(), strict=True):
            keys = inputs.key_cache.flatten(0, 1)[visible[end - 1][visible[end - 1] >= 0]]
            for row in range(start, end):
                best = indexer._scores(inputs, row, keys).topk(min(inputs.top_k, len(keys))).indices.sort().values
                seen = [slot for slot in visible[end - 1][best].tolist() if slot in visible[row]]
                chosen[row] = torch.tensor((seen + [-1] * chosen.shape[1])[: chosen.shape[1]])
        return chosen

    monkeypatch.setattr(decoder_indexer, "topk_slots", unmasked)
    assert largest_error(decoder, saved("deepseek-v3.2")) > 10 * TOLERANCE


# --- what layers cache, and configs ---------------------------------------------------------------------------------


def test_layers_with_an_indexer_cache_its_keys(saved: Callable[[str], Saved]) -> None:
    latent, key = Latent(32, 16), IndexKey(24)
    for name, expected in (("glm-5", [latent, key] * 3), ("glm-5.2", [latent, key, latent, latent, key])):
        config = ModelConfig.from_hf(load_hf_config(saved(name).path))
        assert config.attention_options == {"sparse"}
        for ranks in (1, 2, 4):
            assert list(config.shard(ranks).layer_caches) == expected


def test_published_configs_of_glm_5_2_are_read(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """Another size of heads, another name of the type of layers, and fields of the layers that draft tokens."""
    fields = {"head_dim": 192, "layer_types": ["deepseek_sparse_attention"] * 3, "indexer_rope_interleave": True}
    fields |= {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_share_for_mtp_iteration": True}
    path = copy_with(saved("glm-5.2"), tmp_path, **fields)
    assert largest_error(load(str(path)), saved("glm-5.2")) < TOLERANCE


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no number of tokens": ("deepseek-v3.2", {"index_topk": 0}, "index_topk=0 is not an integer from 1"),
    "no heads": ("glm-5", {"index_n_heads": -1}, "index_n_heads=-1 is not an integer from 1"),
    "keys of fewer elements than are rotated": (
        "deepseek-v3.2",
        {"index_head_dim": 8},
        "index_head_dim=8 is less than the qk_rope_head_dim=16 elements that are rotated; correct",
    ),
    "a first layer without an indexer": (
        "glm-5.2",
        {"indexer_types": ["shared", "full", "full"]},
        "does not say full or shared of each of 3 layers, the first one full; correct config.json",
    ),
    "another rotation": (
        "glm-5",
        {"indexer_rope_interleave": False},
        "indexer_rope_interleave=False, which transformers does not compute for this architecture; docs/models.md",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_config_that_no_such_model_has_is_refused(saved: Callable[[str], Saved], wrong: str, tmp_path: Path) -> None:
    name, fields, message = REFUSED[wrong]
    path = copy_with(saved(name), tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(load_hf_config(path))

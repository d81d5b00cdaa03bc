"""Layers that the paged cache does not serve are refused, whatever the lists of architectures say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from engine.errors import ModelLoadError
from engine.models.adapter import attention as attention_module
from engine.models.adapter.decoder import TransformersDecoder
from engine.models.config import transformers_config as config_module
from engine.models.config.families import architectures as architectures_module
from engine.models.config.families.architectures import PROVEN
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter.conftest import Zoo, load
from tests.engine.models.adapter.tiny_models import TINY_MODELS, build_model

GRANITE = "GraniteForCausalLM"


def save_and_load(path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, **options: Any) -> TransformersDecoder:
    """Load a model as if its architecture were proven: what its layers ask for is the last line of defence."""
    common = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model(model_type, **common | {"pad_token_id": 0} | options)
    model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    monkeypatch.setattr(architectures_module, "PROVEN", PROVEN | {type(model).__name__})
    return load(save_checkpoint(model, path))


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("bert", {"is_decoder": False}, "a layer's attention mask is neither causal nor a causal sliding window"),
        (
            "doge",
            {"num_experts": 64},
            "its modules could not compute a few tokens: '_CausalMask' object has no attribute 'dtype'",
        ),
        ("mamba", {}, "a layer of the type 'linear_attention'"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "could not be loaded: .*pagoda_paged"),
    ],
)
def test_layers_that_the_paged_cache_does_not_serve_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        save_and_load(tmp_path, monkeypatch, model_type, **options)


def test_sinks_that_the_list_does_not_know_are_noticed(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention backend is chosen before the weights are loaded, from what the list says."""
    path = zoo("GptOssForCausalLM").path
    monkeypatch.setattr(config_module, "WITH_SINKS", frozenset())
    with pytest.raises(ModelLoadError, match="its layers have an unexpected sinks"):
        load(path)


def test_values_of_another_size_that_the_list_does_not_know_are_noticed(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zoo("MiMoV2FlashForCausalLM").path
    monkeypatch.setattr(config_module, "WITH_VALUE_DIMS", frozenset())
    with pytest.raises(ModelLoadError, match="its layers have an unexpected value_dims"):
        load(path)


def test_a_layer_that_attends_without_a_mask_is_noticed() -> None:
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelLoadError, match="Identity has an attention mask of its own, or none"):
        attention_module._attention(torch.nn.Identity(), heads, heads, heads, None)


def test_attention_with_an_unknown_argument_is_noticed() -> None:
    heads = torch.zeros(1, 2, 3, 8)
    mask = attention_module._CausalMask(None)
    with pytest.raises(ModelLoadError, match="Identity asks for attention with indices"):
        attention_module._attention(torch.nn.Identity(), heads, heads, heads, mask, indices=torch.zeros(3))


def test_tokens_that_see_each_other_as_those_of_an_image_do_are_noticed() -> None:
    groups = torch.tensor([[0, 0, 1]])

    def sees(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) | (groups[batch, query] == groups[batch, key])

    with pytest.raises(ModelLoadError, match="neither causal nor a causal sliding window"):
        attention_module._require_causal(sees, None)


def test_chunks_are_not_taken_for_a_window() -> None:
    chunked, sliding = chunked_causal_mask_function(7, torch.zeros(1)), sliding_window_causal_mask_function(7)
    attention_module._require_causal(sliding, 7)
    with pytest.raises(ModelLoadError, match="neither causal nor a causal sliding window"):
        attention_module._require_causal(chunked, 7)
    with pytest.raises(ModelLoadError, match="neither causal nor a causal sliding window"):
        attention_module._require_causal(sliding, 8)
    with pytest.raises(ModelLoadError, match="neither causal nor a causal sliding window"):
        attention_module._require_causal(sliding, None)


def test_an_unproven_model_of_proven_layers_would_load(tmp_path: Path) -> None:
    """So that the refusals above are those of the layers, and not of the way in which the test saves a model."""
    assert len(load(save_checkpoint(build_model(GRANITE), tmp_path)).layer_caches) == 2
    assert GRANITE in TINY_MODELS

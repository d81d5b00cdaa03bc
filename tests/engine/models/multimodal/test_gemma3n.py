"""The text part of Gemma 3n, whose multimodal class is built without towers: the one for images needs timm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from tests.engine.models.adapter.greedy_answers import check, make_prompts, oracle
from tests.engine.models.adapter.tiny_models import TINY_MODELS, build_config

TEXT = "gemma3n_text"


def build(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Return a random multimodal model, with a matrix instead of each tower."""
    from_config = AutoModel.from_config

    def text_alone(config: Any, **options: Any) -> nn.Module:
        return from_config(config, **options) if config.model_type == TEXT else nn.Linear(2, 2)

    torch.manual_seed(0)
    with monkeypatch.context() as patched:
        patched.setattr(AutoModel, "from_config", text_alone)
        config = CONFIG_MAPPING["gemma3n"].from_dict(fields)
        model: PreTrainedModel = transformers.Gemma3nForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model


def test_greedy_tokens_equal_those_of_the_multimodal_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = build_config("Gemma3nForCausalLM").to_dict()
    text = {name: usual[name] for name in (*TINY_MODELS["Gemma3nForCausalLM"].options, "vocab_size", "hidden_size")}
    text |= {name: usual[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
    text["hidden_size_per_layer_input"] = 16  # as the C kernels have it
    fields = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "dtype": "float32"}
    fields |= {"text_config": text | {"model_type": TEXT, "intermediate_size": [40] * 5}, "eos_token_id": [1, 106]}
    model = build(fields, monkeypatch)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    expected = oracle(model, make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1
    assert check(str(tmp_path), (4, 7, True, 0.0), expected, model_impl="auto").num_recomputed

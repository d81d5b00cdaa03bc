"""Quantised text parts of every kind of multimodal checkpoint, beside towers that are not quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.models.adapter.greedy_answers import check, make_prompts, oracle
from tests.engine.models.checkpoint.formats.test_multimodal import quantise
from tests.engine.models.multimodal.tiny_checkpoints import TINY, save
from tests.engine.models.published.weight_formats import FORMS

FEW = ("gemma4", "kimi-k2.5", "qwen3.5-moe")


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in TINY])
@pytest.mark.parametrize("form", ["fp8 dynamic", pytest.param("nf4", marks=pytest.mark.long)])
def test_the_tokens_are_those_of_the_multimodal_class(name: str, form: str, tmp_path: Path) -> None:
    tiny, (encode, config, _) = TINY[name], FORMS[form]
    save(name, tmp_path / "plain")
    quantised, count = quantise(tmp_path / "plain", encode, config, in_text=form == "nf4" and not tiny.is_flat)
    assert count >= 6
    whole = getattr(transformers, tiny.architecture).from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = oracle(whole.get_submodule(tiny.generates_with), make_prompts())
    for model_impl in tiny.implementations:
        check(str(quantised), (4, 7, True, 0.0), expected, model_impl=model_impl)

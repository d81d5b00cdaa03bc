"""Layers of transformers' modules that attend to the keys and values of an earlier layer, as in Gemma 3n."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.kv.layer_cache import KeyValue, SharedWith
from tests.engine.models.adapter.conftest import Inhabitant, Zoo, load
from tests.engine.models.adapter.test_logits import TOLERANCE, largest_error
from tests.engine.models.adapter.tiny_models import WINDOW

GEMMA_3N = "Gemma3nForCausalLM"


def test_they_cache_nothing(zoo: Zoo) -> None:
    sliding, full = KeyValue(2, 16, 16, WINDOW), KeyValue(2, 16, 16)
    assert zoo(GEMMA_3N).decoder.layer_caches == (sliding, full, sliding, SharedWith(2), SharedWith(1))


def test_keys_of_another_layer_are_noticed(zoo: Zoo) -> None:
    inhabitant = zoo(GEMMA_3N)
    for wrong in ((SharedWith(0), SharedWith(1)), (SharedWith(2), SharedWith(2))):  # another layer, another type
        decoder = load(inhabitant.path)
        decoder.layer_caches = (*decoder.layer_caches[:3], *wrong)
        assert largest_error(Inhabitant(inhabitant.model, inhabitant.path, decoder)) > 10 * TOLERANCE


def test_their_stored_weights_are_ignored(zoo: Zoo, tmp_path: Path) -> None:
    inhabitant = zoo(GEMMA_3N)
    weights = load_file(Path(inhabitant.path) / "model.safetensors")
    for layer in (3, 4):
        for module in ("k_proj", "v_proj", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{module}.weight"] = torch.full((3,), 7.0)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((Path(inhabitant.path) / "config.json").read_text())
    assert largest_error(Inhabitant(inhabitant.model, str(tmp_path), load(tmp_path))) < TOLERANCE

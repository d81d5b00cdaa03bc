"""Logits of models with experts equal transformers' own, and no planted error goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config import model_config as config_module
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.decoder import loader
from engine.models.tensor_parallel import TensorParallel
from kernels.experts import experts as experts_module
from kernels.experts.route import Scores, route
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel
from tests.engine.models.adapter.packed_steps import make_sequences, packed_logits
from tests.engine.models.adapter.tiny_models import WINDOW
from tests.engine.models.ties import require_no_ties

TOLERANCE = 1e-5  # of the largest logit of a sequence
WINDOWED = ["qwen3", "qwen3_moe", "qwen2_moe"]  # whose config may turn windows on


def largest_error(family: SavedModel) -> float:
    """Return the largest difference of a logit, relative to the largest logit of its sequence."""
    decoder: Any = loader.load_decoder(
        family.path,
        load_hf_config(family.path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        parallel=TensorParallel(),
    )
    compute = decoder.compute_logits
    decoder.compute_logits = lambda *args: compute(*args).clone()  # the C kernels reuse the memory of the logits
    sequences = make_sequences()
    with torch.inference_mode():
        expected = [family.model(tokens[None]).logits[0] for tokens in sequences]
    computed = packed_logits(decoder, sequences)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in zip(computed, expected, strict=True))


@pytest.mark.usefixtures("implementation")
def test_logits_equal_those_of_transformers(sparse_family: SavedModel) -> None:
    assert largest_error(sparse_family) < TOLERANCE
    assert require_no_ties(sparse_family.model, make_sequences()) > 0


def with_windows(family: str, path: Path) -> SavedModel:
    """Return a model of which the upper layers, or all, attend to few tokens."""
    options = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    model = build_model(family, **options)
    return SavedModel(family, model, save_checkpoint(model, path))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_equal_those_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = with_windows(family, tmp_path)
    assert largest_error(saved) < TOLERANCE
    windows = ModelConfig.from_hf(saved.model.config).windows
    assert WINDOW in windows
    for change in (-1, 1):
        changed = tuple(window and window + change for window in windows)
        monkeypatch.setattr(config_module, "_windows", lambda *_, changed=changed: changed)
        assert largest_error(saved) > 10 * TOLERANCE


Routed = tuple[torch.Tensor, torch.Tensor]  # weights and experts
Mistake = Callable[[torch.Tensor, int, bool], Routed]  # of the logits, the number of experts, whether to normalise
MISTAKES: dict[str, Mistake] = {
    "probabilities normalised or not": lambda logits, k, normalize: route(logits, k, normalize=not normalize),
    "another expert": lambda logits, k, normalize: _with(
        route(logits, k, normalize=normalize), ids=lambda ids: (ids + 1) % logits.shape[1]
    ),
    "weights of another choice": lambda logits, k, normalize: _with(
        route(logits, k, normalize=normalize), weights=lambda weights: weights.roll(1, dims=1)
    ),
    "one expert less": lambda logits, k, normalize: route(logits, k - 1, normalize=normalize),
}


def _with(
    routed: Routed,
    weights: Callable[[torch.Tensor], torch.Tensor] = lambda weights: weights,
    ids: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids,
) -> Routed:
    return weights(routed[0]), ids(routed[1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_routing_mistake_is_noticed(sparse_family: SavedModel, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits: torch.Tensor, top_k: int, *, normalize: bool, scores: Scores | None) -> Routed:
        assert scores is None
        return MISTAKES[mistake](logits, top_k, normalize)

    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    monkeypatch.setattr(experts_module, "route", wrong)
    assert largest_error(sparse_family) > 100 * TOLERANCE

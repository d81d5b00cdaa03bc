"""Families with latent attention against transformers: logits of every token, in packed steps of chunks and decodes.

No feature of a family can be left out unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.models.config.model_config import ModelConfig
from engine.models.decoder import loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.experts import SparseMoeBlock
from kernels.cpu.library import library
from kernels.experts.route import Scores
from kernels.layer_ops.torch import TorchOps
from tests.engine.models.adapter.packed_steps import packed_logits
from tests.engine.models.decoder.changed_models import TOLERANCE, Change, largest_difference, load
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES
from tests.engine.models.decoder.saved_models import LONG_STEPS, Saved, make_long_sequences

CPU = torch.device("cpu")


def largest_error(decoder: Any, saved: Saved) -> float:
    return largest_difference(packed_logits(decoder, make_long_sequences(), steps=LONG_STEPS), saved.expected_logits)


@pytest.mark.parametrize("implementation", [CpuDecoder, Decoder])
@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_logits_equal_those_of_transformers(
    saved: Callable[[str], Saved], name: str, implementation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation is Decoder:
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    elif library() is None:
        pytest.skip("there is no C compiler")
    decoder = load(saved(name).path)
    assert isinstance(decoder, implementation)
    assert largest_error(decoder, saved(name)) < TOLERANCE


def mean_error(computed: list[torch.Tensor], saved: Saved) -> float:
    """Return the mean difference of a logit from that of transformers in float32."""
    return float((torch.cat(computed) - torch.cat(saved.expected_logits)).abs().mean())


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("name", ["minicpm3", "youtu", "glm-5.2", pytest.param("deepseek-v3", marks=pytest.mark.long)])
def test_bfloat16_is_as_exact_as_that_of_transformers(
    saved: Callable[[str], Saved], name: str, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although products of matrices are rounded that transformers does not compute."""
    if not in_c:
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    decoder = load(saved(name).path, dtype=torch.bfloat16)
    computed = packed_logits(decoder, make_long_sequences(), torch.bfloat16, steps=LONG_STEPS)
    half = copy.deepcopy(saved(name).model).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(tokens[None], use_cache=False).logits[0].float() for tokens in make_long_sequences()]
    assert mean_error(computed, saved(name)) < 1.5 * mean_error(theirs, saved(name))


# --- planted errors -------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _with_part(part: str, **changes: Any) -> Change:
    return lambda config: replace(config, **{part: replace(getattr(config, part), **changes)})


def _scaled_once(config: ModelConfig) -> ModelConfig:
    plain = config.head_dim**-0.5
    return replace(config, attention_scale=plain * (config.attention_scale / plain) ** 0.5)


def _plain_scale(config: ModelConfig) -> ModelConfig:
    return replace(config, attention_scale=config.head_dim**-0.5)


def _scale_of_content(config: ModelConfig) -> ModelConfig:
    assert config.latent is not None
    return replace(config, attention_scale=config.attention_scale * (config.head_dim / config.latent.nope_dim) ** 0.5)


def _best_of_groups(config: ModelConfig) -> ModelConfig:
    assert config.experts is not None
    assert config.experts.groups is not None
    other = "best" if config.experts.groups.score == "two_best" else "two_best"
    groups = replace(config.experts.groups, score=other)
    return replace(config, experts=replace(config.experts, groups=groups))


PLANTED: dict[str, tuple[str, Change]] = {
    "mscale not squared": ("deepseek-v3", _scaled_once),
    "mscale ignored": ("deepseek-v2", _plain_scale),
    "the scale of a head without positions": ("deepseek-v3", _scale_of_content),
    "halves rotated, not neighbours": ("deepseek-v3", _with_part("rope", rotates_neighbours=False)),
    "halves rotated, not neighbours, in V2": ("deepseek-v2", _with_part("rope", rotates_neighbours=False)),
    "neighbours rotated, not halves": ("deepseek-v3-halves", _with_part("rope", rotates_neighbours=True)),
    "neighbours rotated, not halves, in MiniCPM": ("minicpm3", _with_part("rope", rotates_neighbours=True)),
    "norms of latents with the model's epsilon": ("kimi-k2", _with_part("latent", norm_eps=1e-2)),
    "groups ignored": ("deepseek-v3", _with_part("experts", groups=None)),
    "groups ignored in V2": ("deepseek-v2", _with_part("experts", groups=None)),
    "groups by their best expert": ("deepseek-v3", _best_of_groups),
    "groups by their two best experts": ("deepseek-v2", _best_of_groups),
    "weights of experts not scaled": ("deepseek-v3", _with_part("experts", weight_scale=1.0)),
    "weights of experts not scaled in V2": ("deepseek-v2", _with_part("experts", weight_scale=1.0)),
    "weights of experts normalised": ("deepseek-v3-halves", _with_part("experts", normalizes_weights=True)),
    "weights of experts not normalised": ("glm-4.7-flash", _with_part("experts", normalizes_weights=False)),
    "a softmax of logits": ("glm-4.7-flash", _with_part("experts", scores="softmax")),
    "sigmoids of logits": ("mistral-4", _with_part("experts", scores="sigmoid")),
    "queries that do not grow": ("mistral-4", _with_part("latent", query_growth=None)),
    "embeddings not multiplied": ("minicpm3", _with(embedding_multiplier=1.0)),
    "residuals not multiplied": ("minicpm3", _with(residual_multiplier=1.0)),
    "logits not divided": ("minicpm3", _with(logits_divisor=1.0)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_feature_that_is_left_out_is_noticed(saved: Callable[[str], Saved], planted: str) -> None:
    name, change = PLANTED[planted]
    assert largest_error(load(saved(name).path, change), saved(name)) > 10 * TOLERANCE


def _exchange_halves(decoder: Decoder) -> None:
    matrices = decoder.layers[1].self_attn.kv_b_proj
    by_head = matrices.weight.data.view(matrices.num_heads, -1, matrices.weight.shape[1])
    by_head.copy_(by_head.roll(-matrices.nope_dim, dims=1))  # of each head the value first


def _forget_norm(decoder: Decoder) -> None:
    decoder.layers[1].self_attn.kv_a_layernorm.weight.data.fill_(1.0)


def _bias_in_weights(decoder: Decoder) -> None:
    block: SparseMoeBlock = decoder.layers[2].mlp
    scores = block._scores()
    assert scores is not None
    biased = _BiasedScores(scores.bias, scores.epsilon, scores.scale, scores.is_sigmoid, scores.groups)
    block._scores = lambda: biased


class _BiasedScores(Scores):
    def weights(self, logits: torch.Tensor, ids: torch.Tensor, *, normalize: bool) -> torch.Tensor:
        chosen = self.choice(logits).gather(1, ids)
        return chosen / chosen.sum(dim=-1, keepdim=True) * self.scale if normalize else chosen * self.scale


CHANGED: dict[str, tuple[str, Callable[[Decoder], object]]] = {
    "the halves of kv_b_proj are exchanged": ("deepseek-v3", _exchange_halves),
    "the weights of a latent's norm": ("deepseek-v3", _forget_norm),
    "the weights of the queries' norm": (
        "deepseek-v3",
        lambda decoder: decoder.layers[0].self_attn.q_a_layernorm.weight.data.fill_(1.0),
    ),
    "the bias of the first projection": (
        "kimi-k2",
        lambda decoder: decoder.layers[0].self_attn.qkv_a_proj.bias.data.zero_(),
    ),
    "the bias of the choice of experts": (
        "deepseek-v3",
        lambda decoder: decoder.layers[1].mlp.expert_bias.data.zero_(),
    ),
    "the bias of the choice in the weights": ("glm-4.7-flash", _bias_in_weights),
}


@pytest.mark.parametrize("changed", CHANGED)
def test_a_weight_that_is_left_out_is_noticed(
    saved: Callable[[str], Saved], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    name, change = CHANGED[changed]
    decoder = load(saved(name).path)
    change(decoder)
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


def test_a_latent_that_is_rotated_twice_is_noticed(
    saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    decoder = load(saved("deepseek-v3").path)
    right = TorchOps.rotate_and_store_latents

    def twice(ops: TorchOps, query: Any, rotated: Any, latent: Any, norm: Any, rotation: Any, cache: Any) -> None:
        rank = norm.weight.shape[0]
        cos, sin = (angles[:, 0] for angles in rotation.cos_and_sin)
        first, second = latent[:, rank:].chunk(2, dim=-1)
        keys = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        right(ops, query, rotated, torch.cat((latent[:, :rank], keys), dim=1), norm, rotation, cache)

    monkeypatch.setattr(TorchOps, "rotate_and_store_latents", twice)
    assert largest_error(decoder, saved("deepseek-v3")) > 10 * TOLERANCE

"""Families with recurrent layers against transformers: logits of every token, in packed steps of chunks and decodes.

Sequences are longer than the chunks in which transformers computes its recurrences. No feature of a family can be left
out unnoticed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from engine.models.config.shapes.weight_scales import WeightScales
from engine.models.decoder import loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from kernels.cpu.library import library
from kernels.recurrent_metadata import RecurrentMetadata
from tests.engine.models.adapter import packed_steps
from tests.engine.models.adapter.packed_steps import packed_logits
from tests.engine.models.decoder.changed_models import TOLERANCE, Change, largest_difference, load
from tests.engine.models.decoder.recurrent.recurrent_families import RECURRENT_FAMILIES, few
from tests.engine.models.decoder.saved_models import LONG_STEPS, Saved, make_long_sequences

CPU = torch.device("cpu")


def largest_error(decoder: Any, saved: Saved) -> float:
    return largest_difference(packed_logits(decoder, make_long_sequences(), steps=LONG_STEPS), saved.expected_logits)


@pytest.mark.parametrize("implementation", [CpuDecoder, Decoder])
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_logits_equal_those_of_transformers(
    saved: Callable[[str], Saved], name: str, implementation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation is Decoder:
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    elif library() is None:
        pytest.skip("torch computes every model")
    decoder = load(saved(name).path)
    assert isinstance(decoder, implementation)
    assert largest_error(decoder, saved(name)) < TOLERANCE


def mean_error(computed: list[torch.Tensor], saved: Saved) -> float:
    """Return the mean difference of a logit from that of transformers in float32."""
    return float((torch.cat(computed) - torch.cat(saved.expected_logits)).abs().mean())


@pytest.mark.parametrize("name", few("lfm2-moe", "qwen3-next", "falcon-h1-norm", "nemotron-3-super", "mamba2"))
def test_bfloat16_is_as_exact_as_that_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    computed = packed_logits(
        load(saved(name).path, dtype=torch.bfloat16), make_long_sequences(), torch.bfloat16, steps=LONG_STEPS
    )
    half = copy.deepcopy(saved(name).model).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(tokens[None], use_cache=False).logits[0].float() for tokens in make_long_sequences()]
    assert mean_error(computed, saved(name)) < 1.5 * mean_error(theirs, saved(name))


# --- planted errors -------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _with_part(part: str, **changes: Any) -> Change:
    return lambda config: replace(config, **{part: replace(getattr(config, part), **changes)})


PLANTED: dict[str, tuple[str, Change]] = {
    "weights of norms without 1": ("qwen3.5", _with(norms_add_one=False)),
    "whole heads rotated": ("qwen3-next", _with_part("rope", rotary_dim=32)),
    "half of a head's elements not rotated": ("lfm2", _with_part("rope", rotary_dim=8)),
    "the gate after the norm": ("granite-4-h", _with_part("recurrent", norm="before_gate")),
    "the gate before the norm": ("falcon-h1-norm", _with_part("recurrent", norm="after_gate")),
    "steps without limits": ("bamba-limits", _with_part("recurrent", step_limits=(0.0, float("inf")))),
    "betas not doubled": ("olmo-hybrid", _with_part("recurrent", largest_beta=1.0)),
    "betas doubled": ("olmo-hybrid-rope", _with_part("recurrent", largest_beta=2.0)),
    "positions where there are none": ("olmo-hybrid-rope", _with_part("rope", tables=(None,) * 4)),
    "another epsilon of the gated norm": ("olmo-hybrid", _with_part("recurrent", norm_eps=1e-6)),
    "multipliers of projections ignored": ("falcon-h1", _with(weight_scales=WeightScales())),
    "logits not multiplied": ("falcon-h1", _with(logits_divisor=1.0)),
    "residuals not multiplied": ("granite-4-h-moe", _with(residual_multiplier=1.0)),
    "RoPE ignored": ("granite-4", _with_part("rope", tables=(None, None))),
    "weights of experts not scaled": ("nemotron-3-nano", _with_part("experts", weight_scale=1.0)),
    "weights of experts not normalised": ("lfm2-moe", _with_part("experts", normalizes_weights=False)),
    "a choice among the experts of all groups": ("kimi-linear-groups", _with_part("experts", groups=None)),
    "a softmax of logits": ("nemotron-3-super", _with_part("experts", scores="softmax")),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_feature_that_is_left_out_is_noticed(saved: Callable[[str], Saved], planted: str) -> None:
    name, change = PLANTED[planted]
    assert largest_error(load(saved(name).path, change), saved(name)) > 10 * TOLERANCE


def _recurrent_layer(decoder: Decoder) -> Any:
    return next(layer.recurrent for layer in decoder.layers if layer.recurrent is not None)


def _experts(decoder: Decoder) -> Any:
    return next(layer.mlp for layer in decoder.layers if hasattr(layer.mlp, "experts"))


def _attention(decoder: Decoder) -> Any:
    return next(layer.self_attn for layer in decoder.layers if layer.self_attn is not None)


def _zero(parameter: torch.Tensor) -> None:
    parameter.data.zero_()


def _ignore_gate(decoder: Decoder) -> None:
    attention = _attention(decoder)
    attention.qkv_proj.weight.data[: attention.gate_width] = 0.0


def _exchange_queries_and_keys(decoder: Decoder) -> None:
    layer = _recurrent_layer(decoder)
    queries, keys, values = layer.conv.weight.data.split(layer.shape.conv_sections)
    layer.conv.weight.data = torch.cat((keys, queries, values))


def _decay_heads(decoder: Decoder) -> None:
    """Let all elements of a head's keys have the decay that they have on average."""
    layer = _recurrent_layer(decoder)
    for parameter in (layer.f_b_proj.weight, layer.dt_bias):
        by_head = parameter.data.unflatten(0, (layer.shape.num_heads, -1))
        parameter.data = by_head.mean(1, keepdim=True).expand_as(by_head).flatten(0, 1).clone()


def _activate_gate(decoder: Decoder, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _recurrent_layer(decoder).gated_norm.activation = activation


CHANGED: dict[str, tuple[str, Callable[[Decoder], object]]] = {
    "the bias of a convolution": ("mamba2", lambda decoder: _zero(_recurrent_layer(decoder).conv.bias)),
    "the bias of a short convolution": ("lfm2-biases", lambda decoder: _zero(_recurrent_layer(decoder).conv.bias)),
    "the bias of steps": ("qwen3-next", lambda decoder: _zero(_recurrent_layer(decoder).dt_bias)),
    "the bias of a decay": ("kimi-linear", lambda decoder: _zero(_recurrent_layer(decoder).dt_bias)),
    "the decay of each element of a key": ("kimi-linear", _decay_heads),
    "the sigmoid of a gate": ("kimi-linear", lambda decoder: _activate_gate(decoder, lambda gate: gate)),
    "which activation a gate has": ("kimi-linear", lambda decoder: _activate_gate(decoder, F.silu)),
    "which of three convolutions is of queries": ("kimi-linear", _exchange_queries_and_keys),
    "a decay that is applied twice": (
        "qwen3.5",
        lambda decoder: _recurrent_layer(decoder).A_log.data.add_(math.log(2.0)),
    ),
    "a decay that is applied twice, in Mamba": (
        "mamba2",
        lambda decoder: _recurrent_layer(decoder).A_log.data.add_(math.log(2.0)),
    ),
    "a decay that is applied twice, in Kimi Linear": (
        "kimi-linear",
        lambda decoder: _recurrent_layer(decoder).A_log.data.add_(math.log(2.0)),
    ),
    "the skip connection": ("nemotron-h", lambda decoder: _zero(_recurrent_layer(decoder).D)),
    "which convolution is of queries and which of keys": ("olmo-hybrid", _exchange_queries_and_keys),
    "the weights of a gated norm": (
        "qwen3.5",
        lambda decoder: _recurrent_layer(decoder).gated_norm.weight.data.fill_(1),
    ),
    "the bias of the choice of experts": ("nemotron-3-nano", lambda decoder: _zero(_experts(decoder).expert_bias)),
    "the gate of attention": ("qwen3-next", _ignore_gate),
    "the gate of a shared expert": ("qwen3.5-moe", lambda decoder: _zero(_experts(decoder).shared_expert_gate.weight)),
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


def _forgetful(metadata: RecurrentMetadata) -> RecurrentMetadata:
    return replace(metadata, starts=torch.ones_like(metadata.starts))


def _next_slot(metadata: RecurrentMetadata) -> RecurrentMetadata:
    return replace(metadata, slots=metadata.slots % 2 + 1) if len(metadata.slots) == 1 else metadata


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "kimi-linear", "mamba2"])
def test_a_convolutions_state_that_is_dropped_at_a_chunks_border_is_noticed(
    saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recurrence keeps its own."""
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
    decoder = load(saved(name).path)
    ops = type(_recurrent_layer(decoder).ops)
    right = ops.causal_conv

    def dropping(self: Any, *inputs: Any, **options: Any) -> torch.Tensor:
        output: torch.Tensor = right(self, *inputs[:-1], _forgetful(inputs[-1]), **options)
        return output

    monkeypatch.setattr(ops, "causal_conv", dropping)
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


@pytest.mark.parametrize("mistake", [_forgetful, _next_slot])
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "mamba2"])
def test_a_lost_state_is_noticed(
    saved: Callable[[str], Saved], name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = packed_steps._recurrent
    monkeypatch.setattr(packed_steps, "_recurrent", lambda step: mistake(right(step)))
    assert largest_error(load(saved(name).path), saved(name)) > 10 * TOLERANCE

"""Gemma 3n and 4 against transformers: logits of every token, in packed steps of chunks and decodes.

Contexts are longer than two windows. No feature of a kind can be left out unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from engine.errors import ModelLoadError
from engine.kv.layer_cache import KeyValue, SharedWith
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.weight_scales import WeightScales
from engine.models.decoder import decoder as decoder_module
from engine.models.decoder import feed_forward, loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.gemma.altup import AltUp
from kernels.cpu import reference
from kernels.cpu.library import library
from kernels.cpu.linear import WeightKind, has_int8
from kernels.layer_ops.base import LayerCache
from kernels.layer_ops.torch import TorchOps
from tests.engine.models.adapter.packed_steps import make_sequences, packed_logits
from tests.engine.models.adapter.tiny_models import WINDOW
from tests.engine.models.decoder.changed_models import TOLERANCE, Change, largest_difference, load
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES, save_gemma_model
from tests.engine.models.decoder.saved_models import Saved

ALTUP = "gemma-3n-e4b"
INT8_TOLERANCE = 3e-2  # an element between two steps may be rounded to either, and later layers see the difference


def largest_error(decoder: Any, saved: Saved) -> float:
    return largest_difference(packed_logits(decoder, make_sequences()), saved.expected_logits)


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)


@pytest.mark.parametrize("name", GEMMA_FAMILIES)
@pytest.mark.usefixtures("only_torch")
def test_logits_equal_those_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    decoder = load(saved(name).path)
    assert isinstance(decoder, Decoder)
    assert largest_error(decoder, saved(name)) < TOLERANCE


@pytest.mark.parametrize("name", GEMMA_FAMILIES)
def test_logits_of_the_c_kernels_equal_those_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    decoder = load(saved(name).path)
    assert isinstance(decoder, CpuDecoder)
    assert largest_error(decoder, saved(name)) < TOLERANCE


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"altup_num_inputs": 3, "altup_active_idx": 1, "hidden_size": 72},
        {"altup_num_inputs": 1, "altup_correct_scale": False, "laurel_rank": 70},
        {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6, "vocab_size_per_layer_input": 400},
    ],
    ids=str,
)
def test_other_numbers_of_residual_streams(changes: dict[str, Any], in_c: bool, tmp_path: Path) -> None:
    if in_c and library() is None:
        pytest.skip("no C compiler is installed")
    model = Saved(*save_gemma_model("gemma-3n-e4b", tmp_path, **changes))
    decoder = load(model.path, use_cpu_kernels=in_c)
    assert isinstance(decoder, CpuDecoder) == in_c
    assert largest_error(decoder, model) < TOLERANCE


def test_layers_cache_what_they_read(saved: Callable[[str], Saved]) -> None:
    dense, sharing, alike = (load(saved(name).path).layer_caches for name in ("gemma-4-31b", "gemma-4-e4b", ALTUP))
    sliding, full = KeyValue(2, 16, 16, WINDOW), KeyValue(2, 16, 16)
    assert alike == (sliding, full, sliding, sliding, SharedWith(1), SharedWith(3))
    assert dense == (sliding, KeyValue(1, 32, 32)) * 2
    assert sharing == (*(sliding, KeyValue(2, 32, 32)) * 2, SharedWith(2), SharedWith(2), SharedWith(3))


def mean_error(computed: list[torch.Tensor], saved: Saved) -> float:
    """Return the mean difference of a logit from that of transformers in float32."""
    return float((torch.cat(computed) - torch.cat(saved.expected_logits)).abs().mean())


@pytest.mark.parametrize("name", GEMMA_FAMILIES)
def test_bfloat16_is_as_exact_as_that_of_transformers(saved: Callable[[str], Saved], name: str) -> None:
    computed = packed_logits(load(saved(name).path, dtype=torch.bfloat16), make_sequences(), torch.bfloat16)
    half = copy.deepcopy(saved(name).model).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(tokens[None], use_cache=False).logits[0].float() for tokens in make_sequences()]
    assert mean_error(computed, saved(name)) < 1.5 * mean_error(theirs, saved(name))


@pytest.fixture
def int8() -> None:
    if library() is None or not has_int8():
        pytest.skip("there is no C compiler, or the processor has no instruction for int8")


@pytest.mark.usefixtures("int8")
@pytest.mark.parametrize("name", ["gemma-4-31b", ALTUP])
def test_int8_of_the_kernels_is_as_exact_as_that_of_torch(saved: Callable[[str], Saved], name: str) -> None:
    model = saved(name)
    errors = [
        mean_error(packed_logits(load(model.path, quantization="int8", **options), make_sequences()), model)
        for options in ({}, {"use_cpu_kernels": False})
    ]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.usefixtures("int8")
def test_int8_equals_torch_with_every_product_but_the_routers_quantized(
    saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved("gemma-4-26b-a4b").path
    computed = packed_logits(load(path, quantization="int8"), make_sequences())
    decoder, exact = load(path, use_cpu_kernels=False), F.linear

    def quantized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_router = len(weight) == decoder.config.experts.num_experts
        return exact(x, weight) if is_router else reference.linear(x, weight, bias, WeightKind.INT8)

    monkeypatch.setattr(F, "linear", quantized)
    assert largest_difference(computed, packed_logits(decoder, make_sequences())) < INT8_TOLERANCE


# --- planted errors -------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _with_heads(**changes: Any) -> Change:
    return lambda config: replace(config, layer_heads=replace(config.layer_heads, **changes))


def _with_streams(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.altup is not None
        return replace(config, altup=replace(config.altup, **changes))

    return change


PLANTED: dict[str, tuple[str, Change]] = {
    "keys of an earlier layer of the type": ("gemma-4-e4b", _with_heads(shared={4: 0, 5: 2, 6: 3})),
    "keys of a layer of the other type": ("gemma-4-e2b", _with_heads(shared={4: 2, 5: 3, 6: 3})),
    "keys of a layer of the other type, likewise": (ALTUP, _with_heads(shared={4: 3, 5: 1})),
    "keys of an earlier layer of the type, likewise": (ALTUP, _with_heads(shared={4: 1, 5: 2})),
    "small gates kept": (ALTUP, _with(gate_cutoffs={})),
    "the cut-off of another layer": (ALTUP, _with(gate_cutoffs={0: 0.84, 1: 1.64, 3: -0.52})),
    "another active stream": (ALTUP, _with_streams(active=1)),
    "the active stream not scaled": (ALTUP, _with_streams(scales_output=False)),
    "values not normalized": ("gemma-4-31b", _with(normalizes_values=False)),
    "values not normalized where they have a projection": ("gemma-4-12b", _with(normalizes_values=False)),
    "scores scaled": ("gemma-4-31b", _with(attention_scale=16**-0.5)),
    "logits not capped": ("gemma-4-31b", _with(logits_softcap=None)),
    "embeddings not scaled": ("gemma-4-12b", _with(embedding_multiplier=1.0)),
    "norms that add one": ("gemma-4-31b", _with(norms_add_one=True)),
    "windows ignored": ("gemma-4-31b", _with(windows=(None,) * 4)),
    "another activation": ("gemma-4-12b", _with(activation="silu")),
    "the router's scale without the root of the width": ("gemma-4-26b-a4b", _with(weight_scales=WeightScales())),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_feature_that_is_left_out_is_noticed(saved: Callable[[str], Saved], planted: str) -> None:
    name, change = PLANTED[planted]
    assert largest_error(load(saved(name).path, change), saved(name)) > 10 * TOLERANCE


@pytest.mark.parametrize("rope_type", ["default", "first quarter of the head"])
def test_another_rope_of_full_layers_is_noticed(saved: Callable[[str], Saved], rope_type: str) -> None:
    """Frequencies of the whole head, and frequencies whose exponents are over a quarter of it."""
    model = saved("gemma-4-31b")
    config = load_hf_config(model.path)
    full = config.rope_parameters["full_attention"]
    if rope_type == "default":
        config.rope_parameters["full_attention"] = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    else:
        full["rope_theta"] **= 4.0
    assert largest_error(load(model.path, hf_config=config), model) > 10 * TOLERANCE


def _values_from_normed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchOps.rotate_and_store

    def wrong(ops: TorchOps, qkv: torch.Tensor, *args: Any) -> torch.Tensor:
        query = right(ops, qkv, *args)
        cache: LayerCache = args[3]
        if cache.keys.shape[3] == 32:  # a full-attention layer
            cache.values.copy_(F.rms_norm(cache.keys, (32,), eps=1e-6))
        return query

    monkeypatch.setattr(TorchOps, "rotate_and_store", wrong)


@pytest.mark.usefixtures("only_torch")
def test_values_taken_from_keys_after_their_norm_are_noticed(
    saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved("gemma-4-31b")
    _values_from_normed_keys(monkeypatch)
    assert largest_error(load(model.path), model) > 10 * TOLERANCE


def _deviation_over_tokens(gate_up: torch.Tensor, deviations: float) -> None:
    gates = gate_up[:, : gate_up.shape[1] // 2]
    deviation = torch.std(gates, dim=0, correction=0)
    gates.copy_(torch.relu(gates - (gates.mean(dim=1, keepdim=True) + deviations * deviation)))


def _correct_the_active_one_only(altup: AltUp, predictions: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    streams = predictions.clone()
    streams[altup.shape.active] = computed
    return streams


REPLACED: dict[str, tuple[object, str, object]] = {
    "the deviation of each gate over the tokens": (feed_forward, "_drop_small_gates", _deviation_over_tokens),
    "the factor of attention and the branch beside it": (decoder_module, "LAUREL_SCALE", 1.0),
    "the correction of other streams": (AltUp, "correct", _correct_the_active_one_only),
    "the prediction": (AltUp, "predict", lambda altup, streams: streams),
}


@pytest.mark.parametrize("replaced", REPLACED)
@pytest.mark.usefixtures("only_torch")
def test_a_part_of_several_residual_streams_that_is_wrong_is_noticed(
    saved: Callable[[str], Saved], replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*REPLACED[replaced])
    assert largest_error(load(saved(ALTUP).path), saved(ALTUP)) > 10 * TOLERANCE


CHANGED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "layer scalars": ("gemma-4-31b", lambda layer: layer.layer_scalar.data.fill_(1.0)),
    "the router's scale": ("gemma-4-26b-a4b", lambda layer: layer.mlp.router_norm.weight.data.fill_(64**-0.5)),
    "scales of experts": ("gemma-4-26b-a4b", lambda layer: layer.mlp.sparse.expert_scale.data.fill_(1.0)),
    "the norm of experts' outputs": (
        "gemma-4-26b-a4b",
        lambda layer: layer.mlp.sparse_output_norm.weight.data.fill_(1.0),
    ),
    "a layer's own input": ("gemma-4-e4b", lambda layer: layer.per_layer_input.gate.weight.data.zero_()),
    "corrections of streams": (ALTUP, lambda layer: layer.altup.corrections.data.zero_()),
    "the norm of the router of streams": (ALTUP, lambda layer: layer.altup.router_norm.weight.data.fill_(1.0)),
    "the branch beside attention": (ALTUP, lambda layer: layer.laurel.right.weight.data.zero_()),
    "the norm of the branch": (ALTUP, lambda layer: layer.laurel.post_laurel_norm.weight.data.fill_(1.0)),
    "the norm of a layer's own input": (
        "gemma-4-e4b",
        lambda layer: layer.per_layer_output_norm.weight.data.fill_(1.0),
    ),
}


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.usefixtures("only_torch")
def test_a_weight_that_is_left_out_is_noticed(saved: Callable[[str], Saved], changed: str) -> None:
    name, change = CHANGED[changed]
    decoder = load(saved(name).path)
    change(decoder.layers[1])
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("changed", ["embed_tokens_per_layer", "per_layer_model_projection"])
def test_half_of_the_layers_inputs_left_out_is_noticed(saved: Callable[[str], Saved], changed: str) -> None:
    decoder = load(saved("gemma-4-e2b").path)
    getattr(decoder.per_layer_inputs, changed).weight.data.zero_()
    assert largest_error(decoder, saved("gemma-4-e2b")) > 10 * TOLERANCE


def _swap(structure: Any, one: str, other: str) -> None:
    first, second = getattr(structure, one), getattr(structure, other)
    setattr(structure, one, second)
    setattr(structure, other, first)


IN_C: dict[str, tuple[str, Callable[[Any], object]]] = {
    "layer scalar": ("gemma-4-12b", lambda layer: setattr(layer.c_layer, "output_scale", 1.0)),
    "norm of the own input": ("gemma-4-e4b", lambda layer: setattr(layer.c_layer, "own_output_norm", None)),
    "own input": ("gemma-4-e4b", lambda layer: setattr(layer.c_layer, "own_width", 0)),
    "scalar after the own input": ("gemma-4-e4b", lambda layer: setattr(layer.c_layer, "own_output_scale", 1.0)),
    "the branch beside attention": (ALTUP, lambda layer: setattr(layer.c_layer, "laurel_norm", None)),
    "its factor": (ALTUP, lambda layer: setattr(layer.c_layer, "attention_output_scale", 1.0)),
    "small gates": (ALTUP, lambda layer: setattr(layer.c_layer, "num_gates", 0)),
    "padding among the gates": (ALTUP, lambda layer: setattr(layer.c_layer, "num_gates", 80)),
    "several streams": (ALTUP, lambda layer: setattr(layer.c_layer, "altup", None)),
    "corrections of streams": (ALTUP, lambda layer: layer.altup.set_corrections(torch.zeros(4, 4))),
    "scale of the active stream": (ALTUP, lambda layer: setattr(layer.altup.c_altup, "output_scale", None)),
    "layer scalar after experts": ("gemma-4-26b-a4b", lambda layer: setattr(layer.c_layer, "output_scale", 1.0)),
    "norms of the other branch": (
        "gemma-4-26b-a4b",
        lambda layer: _swap(layer.c_layer, "post_attention_norm", "experts_norm"),
    ),
    "output norms of the other branch": (
        "gemma-4-26b-a4b",
        lambda layer: _swap(layer.c_layer, "dense_output_norm", "experts_output_norm"),
    ),
    "norm of the sum": ("gemma-4-26b-a4b", lambda layer: setattr(layer.c_layer, "mlp_output_norm", None)),
    "experts' input not normed": ("gemma-4-26b-a4b", lambda layer: setattr(layer.c_layer, "experts_norm", None)),
    "scales of experts": ("gemma-4-26b-a4b", lambda layer: setattr(layer.experts.c_experts, "expert_scales", None)),
    "the router's norm": ("gemma-4-26b-a4b", lambda layer: setattr(layer.experts.c_experts, "router_norm", None)),
    "experts": ("gemma-4-26b-a4b", lambda layer: setattr(layer.c_layer, "experts", None)),
    "the experts' activation": ("gemma-4-26b-a4b", lambda layer: setattr(layer.experts.c_experts, "activation", 0)),
}


@pytest.mark.parametrize("planted", IN_C)
def test_a_part_of_a_layer_in_c_that_is_wrong_is_noticed(saved: Callable[[str], Saved], planted: str) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    name, change = IN_C[planted]
    decoder = load(saved(name).path)
    change(decoder.layers[1])
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma-4-e4b", _with(intermediate_sizes={}), r"mlp\.gate_proj\.weight' .* has shape \[192, 64\]"),
        (
            "gemma-4-31b",
            _with_heads(values_are_keys=frozenset()),
            r"lacks the tensor 'model\.layers\.1\.self_attn\.v_proj\.weight'",
        ),
        ("gemma-4-e4b", _with_heads(shared={}), r"self_attn\.k_proj\.weight' .* has shape \[3\]"),
        ("gemma-4-31b", _with(has_layer_scalars=False), r"tensors that a Gemma4ForCausalLM does not, .*layer_scalar"),
    ],
)
def test_a_feature_that_changes_shapes_cannot_be_left_out(
    saved: Callable[[str], Saved], name: str, change: Change, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(saved(name).path, change)

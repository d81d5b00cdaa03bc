"""Llama 4 against transformers: logits of every token, in packed steps of chunks and decodes.

Contexts are several attention chunks long, and chunks of prompts cross their borders. No feature can be left out
unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelLoadError
from engine.kv.layer_cache import KeyValue
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.query_growth import QueryGrowth
from engine.models.decoder import loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from kernels.attention.window import Chunk, Window
from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter.packed_steps import make_sequences, packed_logits
from tests.engine.models.decoder.changed_models import TOLERANCE, Change, largest_difference, load
from tests.engine.models.decoder.llama4.llama4_models import CHUNK, EXTENDED, LLAMA4_MODELS, build_llama4_model
from tests.engine.models.decoder.saved_models import Saved
from tests.engine.models.ties import require_no_ties

SCOUT, MAVERICK, OTHER = LLAMA4_MODELS


def largest_error(decoder: Any, saved: Saved) -> float:
    return largest_difference(packed_logits(decoder, make_sequences()), saved.expected_logits)


@pytest.fixture(params=["kernels", "torch"])
def decoder_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The decoder that computes the model; without the C kernels all of it is torch's."""
    if request.param == "torch":
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
        return Decoder
    if library() is None:
        pytest.skip("no C compiler is installed")
    return CpuDecoder


@pytest.mark.parametrize("name", [*LLAMA4_MODELS, *EXTENDED])
def test_logits_equal_those_of_transformers(saved: Callable[[str], Saved], name: str, decoder_type: type[Any]) -> None:
    decoder = load(saved(name).path)
    assert type(decoder) is decoder_type
    assert largest_error(decoder, saved(name)) < TOLERANCE
    assert require_no_ties(saved(name).model, make_sequences()) > 0


def test_layers_with_chunks_have_pages_of_their_own(saved: Callable[[str], Saved]) -> None:
    in_chunks, full = KeyValue(2, 16, 16, Chunk(CHUNK)), KeyValue(2, 16, 16)
    assert load(saved(SCOUT).path).layer_caches == (in_chunks, in_chunks, in_chunks, full)
    in_chunks = KeyValue(2, 16, 16, Chunk(6))
    assert load(saved(OTHER).path).layer_caches == (full, in_chunks, in_chunks, full)


def mean_error(computed: list[torch.Tensor], saved: Saved) -> float:
    """Return the mean difference of a logit from that of transformers in float32."""
    return float((torch.cat(computed) - torch.cat(saved.expected_logits)).abs().mean())


@pytest.mark.parametrize("name", [SCOUT, pytest.param(MAVERICK, marks=pytest.mark.long)])
def test_bfloat16_is_as_exact_as_that_of_transformers(
    saved: Callable[[str], Saved], name: str, decoder_type: type[Any]
) -> None:
    decoder = load(saved(name).path, dtype=torch.bfloat16)
    assert type(decoder) is decoder_type
    computed = packed_logits(decoder, make_sequences(), torch.bfloat16)
    half = copy.deepcopy(saved(name).model).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(tokens[None], use_cache=False).logits[0].float() for tokens in make_sequences()]
    assert mean_error(computed, saved(name)) < 1.5 * mean_error(theirs, saved(name))


def test_int8_scales_what_experts_read(tmp_path: Path) -> None:
    """All experts compute every token here, or rounding could choose other experts."""
    if library() is None or not has_int8():
        pytest.skip("there is no C compiler, or the processor has no instruction for int8")
    model = build_llama4_model(SCOUT, num_experts_per_tok=4)
    saved = Saved(model, save_checkpoint(model, tmp_path))
    typical = float(torch.cat(saved.expected_logits).abs().mean())
    errors = [
        mean_error(packed_logits(load(saved.path, change, quantization="int8"), make_sequences()), saved)
        for change in (None, _with_experts(scales_inputs=False))
    ]
    assert errors[0] < 0.05 * typical < errors[1]


# --- planted errors -------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _with_rope(**changes: Any) -> Change:
    return lambda config: replace(config, rope=replace(config.rope, **changes))


def _with_experts(**changes: Any) -> Change:
    def change(config: ModelConfig) -> ModelConfig:
        assert config.experts is not None
        return replace(config, experts=replace(config.experts, **changes))

    return change


def _in_place_of_chunks(window: Window | None) -> Change:
    return lambda config: replace(config, windows=tuple(own and window for own in config.windows))


PLANTED: dict[str, tuple[str, Change]] = {
    "chunks too long by a token": (SCOUT, _in_place_of_chunks(Chunk(CHUNK + 1))),
    "chunks too short by a token": (MAVERICK, _in_place_of_chunks(Chunk(CHUNK - 1))),
    "a sliding window for chunks": (SCOUT, _in_place_of_chunks(CHUNK)),
    "chunks ignored": (MAVERICK, _in_place_of_chunks(None)),
    "chunks in all layers": (SCOUT, _with(windows=(Chunk(CHUNK),) * 4)),
    "layers without positions rotated": (SCOUT, _with_rope(tables=(0, 0, 0, 0))),
    "another layer without positions": (MAVERICK, _with_rope(tables=(0, 0, None, 0))),
    "halves rotated": (MAVERICK, _with_rope(rotates_neighbours=False)),
    "no norms of queries and keys": (SCOUT, _with(qk_norm="none")),
    "norms of queries and keys": (MAVERICK, _with(qk_norm="unit")),
    "YaRN's factor where norms remove it": ("yarn", _with_rope(has_factor=True)),
    "YaRN's factor left out": ("yarn without norms", _with_rope(has_factor=False)),
    "temperature left out": (SCOUT, _with(query_growth=None)),
    "temperature one position late": (MAVERICK, _with(query_growth=QueryGrowth(beta=0.2, length=4))),
    "temperature where there is none": (OTHER, _with(query_growth=QueryGrowth(beta=0.2, length=4, first=1))),
    "the router's score on the experts' output": (SCOUT, _with_experts(scales_inputs=False)),
    "the router's scores normalized": (OTHER, _with_experts(normalizes_weights=True)),
    "the router's scores of a softmax": (MAVERICK, _with_experts(scores="softmax")),
    "one expert for two": (OTHER, _with_experts(experts_per_token=1)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_feature_that_is_left_out_is_noticed(
    saved: Callable[[str], Saved], planted: str, decoder_type: type[Any]
) -> None:
    name, change = PLANTED[planted]
    decoder = load(saved(name).path, change)
    assert type(decoder) is decoder_type
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


def test_a_feature_that_changes_shapes_cannot_be_left_out(saved: Callable[[str], Saved]) -> None:
    with pytest.raises(ModelLoadError, match=r"feed_forward\.gate_proj\.weight' .* has shape \[112, 64\]"):
        load(saved(MAVERICK).path, _with(intermediate_size=48))
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'model\.layers\.0\.feed_forward"):
        load(saved(MAVERICK).path, _with_experts(layers=frozenset(range(4))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size=0 is not an integer from 1"),
        ({"moe_layers": ["all"]}, r"moe_layers=\['all'\] is not a list of layers"),
        ({"floor_scale": 0}, "floor_scale=0 is not an integer from 1"),
        ({"attn_scale": float("nan")}, "attn_scale=nan is not a finite number"),
        ({"layer_types": ["sliding_attention"] * 4}, "type 'sliding_attention' is not supported"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    config = build_llama4_model(SCOUT).config
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(config)

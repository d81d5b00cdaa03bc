"""Logits of every token equal transformers' own, and no planted error of the adapter goes unnoticed.

Three sequences are computed in four steps of packed chunks and decodes, through blocks of four tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.adapter import decoder as decoder_module
from engine.models.adapter.attention import AttentionCall
from engine.models.config.families.architectures import PROVEN, WITH_SINKS
from engine.models.decoder.forward_context import ForwardContext
from tests.engine.models.adapter.conftest import Inhabitant, Zoo, settle
from tests.engine.models.adapter.packed_steps import make_sequences, packed_logits
from tests.engine.models.adapter.tiny_models import TINY_MODELS, WINDOW
from tests.engine.models.ties import require_no_ties

TOLERANCE = 1e-5  # of the largest logit of a sequence

WITH_WINDOWS = sorted(name for name, tiny in TINY_MODELS.items() if "sliding_window" in tiny.options)
WITH_SOFTCAP = sorted(name for name, tiny in TINY_MODELS.items() if "attn_logit_softcapping" in tiny.options)
WITH_SCALE = ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel", "GraniteForCausalLM", "OPTForCausalLM"]
WITH_SCALED_LOGITS = ["CohereForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM", "NanoChatForCausalLM"]


def largest_error(inhabitant: Inhabitant) -> float:
    """Return the largest difference of a logit, relative to the largest logit of its sequence."""
    computed = packed_logits(inhabitant.decoder, make_sequences())
    return max(
        float((got - want).abs().max() / want.abs().max())
        for got, want in zip(computed, inhabitant.expected_logits, strict=True)
    )


def test_the_list_names_what_is_compared() -> None:
    assert set(TINY_MODELS) == PROVEN
    assert len(PROVEN) >= 40


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_logits_equal_those_of_transformers(zoo: Zoo, architecture: str) -> None:
    inhabitant = zoo(architecture)
    assert largest_error(inhabitant) < TOLERANCE
    num_choices = require_no_ties(inhabitant.model, make_sequences())
    assert (num_choices > 0) == (architecture in WITH_EXPERTS)
    if architecture in WITH_WINDOWS:
        assert WINDOW in inhabitant.decoder.attention.windows


# Their routers take the largest score, and then the largest of the others, without torch.topk.
OTHER_ROUTERS = {"BeamForCausalLM", "PhimoeForCausalLM"}
WITH_EXPERTS = {name for name, tiny in TINY_MODELS.items() if "num_experts" in str(tiny.options)} - OTHER_ROUTERS

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0, 8.0]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
BY_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Phi3ForCausalLM", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ("LlamaForCausalLM", {"hidden_act": "gelu", "rope_parameters": QUARTER}),
    ("LlamaForCausalLM", {"num_key_value_heads": 1, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Gemma3ForCausalLM", {"rope_parameters": BY_LAYER}),
    ("GptOssForCausalLM", {"rope_parameters": YARN}),
    ("GlmForCausalLM", {"rope_parameters": QUARTER, "attention_bias": True}),
    ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "attention_bias": False}),
    ("StableLmForCausalLM", {"use_parallel_residual": False, "use_qkv_bias": True}),
    ("OPTForCausalLM", {"do_layer_norm_before": False}),
    ("GPTBigCodeForCausalLM", {"multi_query": False}),
    ("MistralForCausalLM", {"sliding_window": None}),
    ("MixtralForCausalLM", {"sliding_window": None, "num_experts_per_tok": 1}),
    ("Qwen3MoeForCausalLM", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    ("PhimoeForCausalLM", {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.3}}),
]
SOME_SLIDE: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
BY_TYPE: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: list[tuple[str, dict[str, Any]]] = [  # of architectures whose models above have none
    ("PhimoeForCausalLM", {"sliding_window": WINDOW}),
    ("Ministral3ForCausalLM", {"sliding_window": WINDOW}),
    ("Qwen2MoeForCausalLM", SOME_SLIDE),
    ("Qwen3ForCausalLM", SOME_SLIDE),
    ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": WINDOW}),
    ("SmolLM3ForCausalLM", BY_TYPE | {"use_sliding_window": True}),
]


@pytest.mark.parametrize(("architecture", "options"), VARIANTS)
def test_variants_of_an_architecture_equal_transformers(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    inhabitant = settle(architecture, tmp_path, **options)
    assert largest_error(inhabitant) < TOLERANCE
    for name, value in options.items():
        assert getattr(inhabitant.model.config, name) == value


@pytest.mark.parametrize(("architecture", "options"), WINDOWS)
def test_windows_of_an_architecture_that_may_have_them_equal_transformers(
    tmp_path: Path, architecture: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inhabitant = settle(architecture, tmp_path, **options)
    assert WINDOW in inhabitant.decoder.attention.windows
    assert largest_error(inhabitant) < TOLERANCE
    plant(monkeypatch, lambda call: replace(call, sliding_window=call.sliding_window and call.sliding_window + 1))
    assert largest_error(inhabitant) > TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "architecture", ["Gemma2ForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM", "GlmForCausalLM"]
)
def test_half_precision_is_as_exact_as_that_of_transformers(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    all_experts = {"num_experts_per_tok": 4}  # else the last bits could choose other experts
    inhabitant = settle(architecture, tmp_path, dtype, **all_experts if architecture == "GptOssForCausalLM" else {})
    computed = packed_logits(inhabitant.decoder, make_sequences(), dtype)
    exact = inhabitant.expected_logits
    with torch.inference_mode():
        half = inhabitant.model.to(dtype)
        theirs = [half(tokens[None]).logits[0].float() for tokens in make_sequences()]
    assert mean_error(computed, exact) < 1.5 * mean_error(theirs, exact)


def mean_error(computed: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the mean difference of a logit."""
    return float((torch.cat(computed) - torch.cat(expected)).abs().mean())


# --- planted errors -------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[AttentionCall], AttentionCall]) -> None:
    """Let the adapter compute a changed attention."""
    attend = decoder_module._PagedLayers.attend
    monkeypatch.setattr(decoder_module._PagedLayers, "attend", lambda layers, call: attend(layers, change(call)))


@pytest.mark.parametrize("architecture", WITH_WINDOWS)
def test_a_mask_that_is_ignored_is_noticed(zoo: Zoo, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda call: replace(call, sliding_window=None))
    assert largest_error(zoo(architecture)) > TOLERANCE


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("architecture", WITH_WINDOWS)
def test_a_window_of_another_length_is_noticed(
    zoo: Zoo, architecture: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        monkeypatch,
        lambda call: replace(call, sliding_window=call.sliding_window and call.sliding_window + change),
    )
    assert largest_error(zoo(architecture)) > TOLERANCE


@pytest.mark.parametrize("architecture", WITH_SCALE)
def test_a_scale_that_is_left_out_is_noticed(zoo: Zoo, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda call: replace(call, scale=call.query.shape[-1] ** -0.5))
    assert largest_error(zoo(architecture)) > TOLERANCE


@pytest.mark.parametrize("architecture", WITH_SOFTCAP)
def test_a_softcap_that_is_left_out_is_noticed(zoo: Zoo, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda call: replace(call, softcap=None))
    assert largest_error(zoo(architecture)) > TOLERANCE


@pytest.mark.parametrize("architecture", sorted(WITH_SINKS))
def test_sinks_that_are_left_out_are_noticed(zoo: Zoo, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda call: replace(call, sinks=None))
    assert largest_error(zoo(architecture)) > TOLERANCE


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_positions_off_by_one_at_a_chunk_s_border_are_noticed(
    zoo: Zoo, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = decoder_module.TransformersDecoder.__call__

    def shifted(
        self: decoder_module.TransformersDecoder,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        is_later_chunk = context.metadata.seq_lens - context.metadata.cu_seqlens_q.diff() > 0
        offsets = is_later_chunk.long().repeat_interleave(context.metadata.cu_seqlens_q.diff().long())
        return compute(self, token_ids, positions + offsets, context)

    monkeypatch.setattr(decoder_module.TransformersDecoder, "__call__", shifted)
    assert largest_error(zoo(architecture)) > TOLERANCE


@pytest.mark.parametrize("architecture", WITH_SCALED_LOGITS)
def test_logits_that_are_not_scaled_are_noticed(zoo: Zoo, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = zoo(architecture).model.lm_head
    monkeypatch.setattr(
        decoder_module.TransformersDecoder,
        "compute_logits",
        lambda self, hidden, indices: head(hidden.index_select(0, indices)),
    )
    assert largest_error(zoo(architecture)) > TOLERANCE

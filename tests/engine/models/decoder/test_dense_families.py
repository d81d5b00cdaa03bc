"""Our own decoder, on torch's operators and on the C kernels, against transformers: logits of every token in packed
steps of chunks and decodes, tokens and beams of engines. No feature of a family can be left out unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from engine.llm import LLM
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.models.config.shapes.rope import RopeConfig
from engine.models.decoder import loader
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.tensor_parallel import TensorParallel
from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.models.adapter import greedy_answers
from tests.engine.models.adapter.packed_steps import make_sequences, packed_logits
from tests.engine.models.adapter.tiny_models import WINDOW, build_config
from tests.engine.models.decoder.dense_families import DENSE_FAMILIES, save_dense_model
from tests.engine.models.decoder.family_answers import check_beams
from tests.engine.models.decoder.saved_models import Saved, saved_models

TOLERANCE = 1e-5  # of the largest logit of a sequence
CPU = torch.device("cpu")
Change = Callable[[ModelConfig], ModelConfig]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function from a family's name to its model."""
    return saved_models(save_dense_model, tmp_path_factory)


@pytest.fixture(params=["kernels", "torch"])
def decoder_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The decoder that computes the model; without the C kernels all of it is torch's."""
    if request.param == "torch":
        monkeypatch.setattr(loader, "cpu_kernels_can_run", lambda *_: False)
        return Decoder
    if library() is None:
        pytest.skip("no C compiler is installed")
    return CpuDecoder


def load(
    path: str,
    change: Change | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    use_cpu_kernels: bool = True,
) -> Any:
    """Load a model; with ``change``, as if its config said something else."""
    from_hf = ModelConfig.from_hf
    with pytest.MonkeyPatch.context() as patched:
        if change is not None:
            patched.setattr(ModelConfig, "from_hf", lambda config: change(from_hf(config)))
        return loader.load_decoder(
            path,
            load_hf_config(path),
            dtype=dtype,
            device=CPU,
            max_model_len=64,
            parallel=TensorParallel(),
            quantization=quantization,
            use_cpu_kernels=use_cpu_kernels,
        )


def largest_error(decoder: Any, saved: Saved) -> float:
    """Return the largest difference of a logit, relative to the largest logit of its sequence."""
    computed = packed_logits(decoder, make_sequences())
    return max(
        float((got - want).abs().max() / want.abs().max())
        for got, want in zip(computed, saved.expected_logits, strict=True)
    )


@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_logits_equal_those_of_transformers(saved: Callable[[str], Saved], name: str, decoder_type: type[Any]) -> None:
    decoder = load(saved(name).path)
    assert type(decoder) is decoder_type
    assert largest_error(decoder, saved(name)) < TOLERANCE
    has_windows = name in ("smollm3-windows", "phi3", "olmo3", "gemma2", "gemma3", "gemma3-4b")
    assert (WINDOW in decoder.attention.windows) == has_windows


def mean_error(computed: list[torch.Tensor], saved: Saved) -> float:
    """Return the mean difference of a logit from that of transformers in float32."""
    return float((torch.cat(computed) - torch.cat(saved.expected_logits)).abs().mean())


@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_bfloat16_is_as_exact_as_that_of_transformers(
    saved: Callable[[str], Saved], name: str, decoder_type: type[Any]
) -> None:
    decoder = load(saved(name).path, dtype=torch.bfloat16)
    assert type(decoder) is decoder_type
    computed = packed_logits(decoder, make_sequences(), torch.bfloat16)
    half = copy.deepcopy(saved(name).model).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = [half(tokens[None]).logits[0].float() for tokens in make_sequences()]
    assert mean_error(computed, saved(name)) < 1.5 * mean_error(theirs, saved(name))


@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_int8_of_the_kernels_is_as_exact_as_that_of_torch(saved: Callable[[str], Saved], name: str) -> None:
    if library() is None or not has_int8():
        pytest.skip("there is no C compiler, or the processor has no instruction for int8")
    errors = [
        mean_error(packed_logits(load(saved(name).path, quantization="int8", **options), make_sequences()), saved(name))
        for options in ({}, {"use_cpu_kernels": False})
    ]
    assert errors[0] < 1.2 * errors[1]


# --- planted errors -------------------------------------------------------------------------------------------------


def _with(**changes: Any) -> Change:
    return lambda config: replace(config, **changes)


def _with_rope(**changes: Any) -> Change:
    return lambda config: replace(config, rope=replace(config.rope, **changes))


def _with_windows(change: Callable[[int | None], int | None]) -> Change:
    return lambda config: replace(config, windows=tuple(map(change, config.windows)))


PLANTED: dict[str, tuple[str, Change]] = {
    "no unrotated layers": ("smollm3", _with_rope(tables=(0, 0))),
    "unrotated layers changed": ("smollm3", _with_rope(tables=(None, 0))),
    "windows ignored in SmolLM3": ("smollm3-windows", _with_windows(lambda window: None)),
    "windows ignored in Phi-3": ("phi3", _with_windows(lambda window: None)),
    "windows too long in Gemma 3": ("gemma3", _with_windows(lambda window: window and window + 1)),
    "windows too short in Gemma 2": ("gemma2", _with_windows(lambda window: window and window - 1)),
    "windows in all layers of Gemma 2": ("gemma2", _with_windows(lambda window: WINDOW)),
    "neighbours rotated in Phi-4-mini": ("phi4-mini", _with_rope(rotates_neighbours=True)),
    "whole heads rotated in GLM-4": ("glm4", _with_rope(rotary_dim=16)),
    "halves rotated in GLM-4": ("glm4", _with_rope(rotates_neighbours=False)),
    "embeddings not multiplied in Granite": ("granite", _with(embedding_multiplier=1.0)),
    "residuals not multiplied": ("granite", _with(residual_multiplier=1.0)),
    "attention's multiplier ignored": ("granite", _with(attention_scale=16**-0.5)),
    "logits not divided": ("granite", _with(logits_divisor=1.0)),
    "embeddings not scaled in Gemma 2": ("gemma2", _with(embedding_multiplier=1.0)),
    "weights of norms without 1": ("gemma2", _with(norms_add_one=False)),
    "query_pre_attn_scalar ignored": ("gemma2", _with(attention_scale=16**-0.5)),
    "scores not capped": ("gemma2", _with(attention_softcap=None)),
    "scores capped otherwise": ("gemma2", _with(attention_softcap=2.5)),
    "logits not capped in Gemma 2": ("gemma2", _with(logits_softcap=None)),
    "logits not capped in Gemma 3": ("gemma3", _with(logits_softcap=None)),
    "another activation": ("gemma3", _with(activation="silu")),
    "one RoPE for all layers": ("gemma3", _with_rope(tables=(0, 0))),
    "YaRN in all layers of OLMo 3": ("olmo3", _with_rope(tables=(0, 0))),
    "halves rotated in GLM": ("glm", _with_rope(rotates_neighbours=False)),
    "weights of norms without 1 in Gemma": ("gemma", _with(norms_add_one=False)),
    "another activation in Gemma": ("gemma", _with(activation="silu")),
    "the RoPEs of layer types swapped": ("gemma3-4b", _with_rope(tables=(0, 1))),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_feature_that_is_left_out_is_noticed(
    saved: Callable[[str], Saved], planted: str, decoder_type: type[Any]
) -> None:
    name, change = PLANTED[planted]
    decoder = load(saved(name).path, change)
    assert type(decoder) is decoder_type
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


@pytest.mark.parametrize("norm", ["attention_output_norm", "mlp_output_norm"])
@pytest.mark.parametrize("name", ["olmo2", "olmo3", "glm4", "gemma2", "gemma3"])
def test_an_output_norm_that_is_left_out_is_noticed(
    saved: Callable[[str], Saved], name: str, norm: str, decoder_type: type[Any]
) -> None:
    decoder = load(saved(name).path)
    if decoder_type is Decoder:
        setattr(decoder.layers[0], norm, None)
    else:
        setattr(decoder.layers[0].c_layer, norm, None)
    assert largest_error(decoder, saved(name)) > 10 * TOLERANCE


@pytest.mark.parametrize("norm", ["query_norm", "key_norm"])
def test_norms_over_each_head_instead_of_all_are_noticed(saved: Callable[[str], Saved], norm: str) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    decoder = load(saved("olmo2").path)
    decoder.layers[0].c_layer.norms_all_heads = 0
    assert largest_error(decoder, saved("olmo2")) > 10 * TOLERANCE
    decoder.layers[0].c_layer.norms_all_heads = 1
    setattr(decoder.layers[0].c_layer, norm, None)
    assert largest_error(decoder, saved("olmo2")) > 10 * TOLERANCE


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_greedy_tokens_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    """With blocks of 4 tokens, steps of 7, shared prefixes, a cached prompt, and preemption."""
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    for swap_space_gib in (0.0, 0.001):
        setting = (4, 7, True, swap_space_gib)
        activity = greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")
        if swap_space_gib:
            activity.check_swapped()
        else:
            assert activity.num_recomputed


IN_CI = ("smollm3-windows", "gemma3")
SWEEP = pytest.mark.exhaustive("24 settings of every family; CI runs one with windows, and one with all norms")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in IN_CI else SWEEP) for name in DENSE_FAMILIES]
)
def test_greedy_tokens_in_every_setting(saved: Callable[[str], Saved], name: str, decoder_type: type[Any]) -> None:
    expected = greedy_answers.oracle(saved(name).model, greedy_answers.make_prompts())
    for setting in greedy_answers.SETTINGS:
        greedy_answers.check(saved(name).path, setting, expected, model_impl="pagoda")


@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_beams_equal_transformers(saved: Callable[[str], Saved], name: str) -> None:
    check_beams(saved(name), model_impl="pagoda")


def test_auto_chooses_our_own_decoder(saved: Callable[[str], Saved]) -> None:
    for name in DENSE_FAMILIES:
        llm = LLM(saved(name).path, device="cpu", skip_tokenizer_init=True, num_blocks=64)
        assert isinstance(llm.engine.runner.workers.local.shard.model, CpuDecoder | Decoder)  # type: ignore[attr-defined]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_ranks_cannot_share_norms_over_all_heads() -> None:
    config = ModelConfig.from_hf(build_config("Olmo2ForCausalLM"))
    with pytest.raises(
        UnsupportedModelError,
        match="over 1 is not supported for 'Olmo2ForCausalLM', whose norms .*; set model_impl to transformers",
    ):
        config.check_options(max_model_len=64, tensor_parallel_size=2, quantization=None)


def test_longrope_is_refused_beyond_the_context_in_which_requests_cannot_change_each_other(
    saved: Callable[[str], Saved],
) -> None:
    config = ModelConfig.from_hf(load_hf_config(saved("phi4-mini").path))
    options: dict[str, Any] = {"tensor_parallel_size": 1, "quantization": None}
    config.check_options(max_model_len=1024, **options)
    with pytest.raises(ConfigError, match="max_model_len=1025 exceeds the 1024 positions that LongRoPE"):
        config.check_options(max_model_len=1025, **options)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; .*tanh"),
        ("GraniteForCausalLM", {"hidden_act": "relu"}, "hidden_act='relu' is not supported; supported: silu"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked_attention", "full_attention"]}, "type 'chunked_attention'"),
        ("Glm4ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "rotates 3 of a head's 16 elements"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(build_config(architecture, **options))


def test_the_elements_of_heads_are_brought_into_the_decoders_order() -> None:
    def order(rotary_dim: int, rotates_neighbours: bool) -> list[int] | None:
        rope = RopeConfig(
            layer_types=(None,),
            tables=(0,),
            rotary_dim=rotary_dim,
            rotates_neighbours=rotates_neighbours,
            longrope_length=None,
        )
        return rope.element_order(8)

    assert order(8, False) is None
    assert order(8, True) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert order(4, False) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order(4, True) == [0, 2, 4, 5, 1, 3, 6, 7]

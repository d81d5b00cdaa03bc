"""The reference computes what transformers' own functions compute, for whole sequences and from a state on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from kernels.recurrent.reference import ReferenceOps
from tests.kernels.recurrent.operations import Chunk, Conv, DeltaRule, Scan, Tokens, new_states, run_step

LENGTH = 70  # more than a chunk of transformers' chunked rule


def whole(operation: Any, tokens: Tokens, *, starts: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs, and the states before and after, of one sequence."""
    states = new_states(operation, 3)
    before = torch.zeros_like(states[1]) if starts else states[1].clone()
    (output,) = run_step(ReferenceOps(), operation, states, [Chunk(tokens, slot=1, starts=starts)])
    return output, before, states[1]


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(
    ("rule", "operation"),
    [
        (modeling_qwen3_next.torch_recurrent_gated_delta_rule, DeltaRule()),
        (modeling_qwen3_next.torch_chunk_gated_delta_rule, DeltaRule()),
        (modeling_qwen3_5.torch_recurrent_gated_delta_rule, DeltaRule()),
        (modeling_kimi_linear.recurrent_kimi_delta_attention, DeltaRule(num_key_heads=4, decays_rows=True)),
        (modeling_kimi_linear.chunk_kimi_delta_attention, DeltaRule(num_key_heads=4, decays_rows=True)),
    ],
)
def test_the_gated_delta_rule_is_that_of_transformers(
    rule: Callable[..., Any], operation: DeltaRule, starts: bool
) -> None:
    tokens = operation.tokens(LENGTH, seed=10)
    output, before, after = whole(operation, tokens, starts=starts)
    expected, state = rule(
        *(part[None] for part in tokens),
        initial_state=before[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("starts", [True, False])
def test_the_selective_scan_is_that_of_transformers(starts: bool) -> None:
    operation = Scan()
    inputs, steps, keys, queries = tokens = operation.tokens(LENGTH, seed=10)
    output, before, after = whole(operation, tokens, starts=starts)
    expected, state = modeling_mamba2.mamba2_chunk_scan(
        inputs[None],
        steps[None],
        operation.decay,
        keys[None],
        queries[None],
        chunk_size=16,
        D=operation.skip,
        initial_states=before[None],
        return_final_states=True,
    )
    torch.testing.assert_close(output, expected[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(after, state[0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_is_that_of_transformers(has_bias: bool) -> None:
    operation = Conv(has_bias=has_bias)
    (inputs,) = tokens = operation.tokens(LENGTH, seed=10)
    output, _, after = whole(operation, tokens, starts=True)
    expected = modeling_mamba2.causal_conv1d_fn(inputs.T[None], operation.weight, operation.bias, activation="silu")
    torch.testing.assert_close(output, expected[0].T)
    torch.testing.assert_close(after, inputs[-3:])


def test_one_token_of_the_convolution_is_that_of_transformers() -> None:
    operation = Conv()
    (inputs,) = tokens = operation.tokens(1, seed=10)
    output, state, after = whole(operation, tokens, starts=False)
    past = state.T[None].clone()
    expected = modeling_mamba2.causal_conv1d_update(inputs.T[None], past, operation.weight, activation="silu")
    torch.testing.assert_close(output, expected[0].T)
    torch.testing.assert_close(after, past[0].T)  # which it updates in place


def test_a_short_convolution_is_that_of_lfm2() -> None:
    config = Lfm2Config(hidden_size=24, num_hidden_layers=1, layer_types=["conv"])
    torch.manual_seed(0)
    layer = modeling_lfm2.Lfm2ShortConv(config, 0)
    hidden = torch.randn(LENGTH, 24)
    operation = Conv(channels=24, width=config.conv_L_cache, silu=False)
    with torch.no_grad():
        layer.conv.weight.copy_(operation.weight[:, None])
        before, after, x = layer.in_proj(hidden).chunk(3, dim=-1)
        output, _, _ = whole(operation, (before * x,), starts=True)
        torch.testing.assert_close(layer.out_proj(after * output), layer(hidden[None])[0])

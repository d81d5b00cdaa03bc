"""Mixture of experts by torch against the reference, which computes token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import experts as module
from kernels import reference
from kernels.experts import experts, route

Compute = Callable[..., torch.Tensor]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NUM_EXPERTS, HIDDEN, INNER = 5, 24, 20


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_routing_chooses_the_most_probable_experts(top_k: int, normalize: bool) -> None:
    logits = torch.randn(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)) * 3
    weights, ids = route(logits, top_k, normalize=normalize)
    expected_weights, expected_ids = reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


def test_routing_of_bfloat16_is_computed_in_float32() -> None:
    logits = torch.randn(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(route(logits, 2, normalize=True)[0], route(logits.float(), 2, normalize=True)[0])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("compute", [experts, module._dense], ids=["grouped", "dense"])
def test_each_token_gets_the_weighted_sum_of_its_experts(compute: Compute, num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    hidden, gate_up = random(num_tokens, HIDDEN), random(NUM_EXPERTS, 2 * INNER, HIDDEN)
    down = random(NUM_EXPERTS, HIDDEN, INNER)
    weights, ids = route(random(num_tokens, NUM_EXPERTS) * 4, 3, normalize=False)
    got = compute(hidden, gate_up, down, weights, ids)
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        got, reference.experts(hidden, gate_up, down, weights, ids), atol=tolerance, rtol=tolerance
    )

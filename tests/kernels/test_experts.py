"""Mixture of experts by torch against the reference, which computes token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import reference
from kernels.experts import experts, route

Compute = Callable[..., torch.Tensor]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NUM_EXPERTS, INNER = 5, 20


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


@pytest.fixture(params=["torch", "triton"])
def compute(request: pytest.FixtureRequest) -> Compute:
    if request.param == "torch":
        return experts
    request.getfixturevalue("kernel_device")
    from kernels.experts_triton import experts_triton

    return experts_triton


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case:
    """Random weights, and tokens that are routed at random."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, device: torch.device, hidden: int = 24) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

        self.hidden, self.gate_up = random(num_tokens, hidden), random(NUM_EXPERTS, 2 * INNER, hidden)
        self.down = random(NUM_EXPERTS, hidden, INNER)
        self.weights, self.ids = route(random(num_tokens, NUM_EXPERTS) * 4, 3, normalize=False)

    def check(self, compute: Compute) -> None:
        tensors = (self.hidden, self.gate_up, self.down, self.weights, self.ids)
        got, expected, tolerance = compute(*tensors), reference.experts(*tensors), TOLERANCES[self.hidden.dtype]
        assert got.dtype == self.hidden.dtype
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_each_token_gets_the_weighted_sum_of_its_experts(
    compute: Compute, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    if dtype == torch.bfloat16 and compute is not experts and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    Case(num_tokens, dtype, device).check(compute)


def test_tiles_of_many_rows_and_rows_of_several_blocks(compute: Compute, device: torch.device) -> None:
    Case(70, torch.float32, device, hidden=130).check(compute)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 60])
def test_experts_without_a_token_and_one_with_all(compute: Compute, num_tokens: int, device: torch.device) -> None:
    case = Case(num_tokens, torch.float32, device)
    case.ids[:] = torch.tensor([4, 1, 3])
    case.check(compute)


def test_no_token_is_no_work(compute: Compute, device: torch.device) -> None:
    case = Case(0, torch.float32, device)
    assert compute(case.hidden, case.gate_up, case.down, case.weights, case.ids).shape == (0, 24)

"""Mixture of experts by torch and in Triton against the references, which compute token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.experts import reference
from kernels.experts.experts import routed_experts
from kernels.experts.route import Scores, route

Compute = Callable[..., torch.Tensor]
Routed = tuple[torch.Tensor, torch.Tensor]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NUM_EXPERTS, INNER = 5, 20  # features of an expert; not a multiple of 16, so that two kinds of tiles are used


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# --- routing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["torch", "triton"])
def choose(request: pytest.FixtureRequest) -> Callable[..., Routed]:
    if request.param == "torch":
        return route
    request.getfixturevalue("kernel_device")
    from kernels.experts.triton.routing import route_triton

    def choose_and_check(logits: torch.Tensor, top_k: int, *, normalize: bool) -> Routed:
        routes = route_triton(logits, top_k, normalize=normalize)
        check_tiles(routes, logits.shape[1])
        return routes.weights, routes.ids.long()

    return choose_and_check


def check_tiles(routes: Any, num_experts: int) -> None:
    """Check that the tiles list each pair once, those of an expert in order."""
    ids, pairs, counts = routes.ids.flatten().tolist(), routes.pairs.tolist(), routes.num_pairs.tolist()
    assert counts == [ids.count(expert) for expert in range(num_experts)]
    for expert, count in enumerate(counts):
        assert pairs[expert][:count] == [pair for pair, its in enumerate(ids) if its == expert]
    tiles = list(zip(routes.tile_experts.tolist(), routes.tile_starts.tolist(), strict=True))
    expected = [(expert, start) for expert, count in enumerate(counts) for start in range(0, count, 64)]
    assert tiles[: len(expected)] == expected
    assert {expert for expert, _ in tiles[len(expected) :]} <= {-1}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (1, 17, 8), (9, 5, 5), (70, 5, 3), (300, 3, 2)]
)
def test_routing_chooses_the_most_probable_experts(
    choose: Callable[..., Routed],
    num_tokens: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    device: torch.device,
) -> None:
    logits = random(num_tokens, num_experts, scale=3.0).to(device)
    weights, ids = choose(logits, top_k, normalize=normalize)
    expected_weights, expected_ids = reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [3, 70])
def test_of_equal_logits_the_first_is_chosen(
    choose: Callable[..., Routed], num_tokens: int, device: torch.device
) -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -1.0, 0.0]], device=device).repeat(num_tokens, 1)
    weights, ids = choose(logits, 4, normalize=False)
    assert ids.tolist() == [[1, 3, 0, 2]] * num_tokens
    torch.testing.assert_close(weights, reference.route(logits, 4, normalize=False)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_is_computed_in_float32(
    choose: Callable[..., Routed], dtype: torch.dtype, device: torch.device
) -> None:
    logits = (random(9, NUM_EXPERTS) * 3).to(device, dtype)
    assert torch.equal(choose(logits, 2, normalize=True)[0], choose(logits.float(), 2, normalize=True)[0])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
def test_any_logits_choose_experts_that_exist_and_differ(kernel_device: torch.device) -> None:
    from kernels.experts.triton.routing import route_triton

    logits = torch.tensor([[torch.nan] * 5, [torch.inf] * 5, [-torch.inf] * 5, [0, -torch.nan, 1e38, 3, -torch.inf]])
    ids = route_triton(logits.to(kernel_device), 3, normalize=True).ids.tolist()
    assert all(len(set(its)) == 3 and set(its) <= set(range(5)) for its in ids)


def test_logits_may_have_a_stride(kernel_device: torch.device) -> None:
    from kernels.experts.triton.routing import route_triton

    wide = random(7, 24).to(kernel_device)
    routes = route_triton(wide[:, 3:9], 2, normalize=True)
    assert torch.equal(routes.ids.long(), reference.route(wide[:, 3:9], 2, normalize=True)[1])


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_routes_have_the_same_bits_in_any_batch(num_tokens: int, kernel_device: torch.device) -> None:
    from kernels.experts.triton.routing import route_triton

    logits = random(num_tokens, 6).to(kernel_device)
    together = route_triton(logits, 3, normalize=True)
    for token in (0, num_tokens // 2, num_tokens - 1):
        alone = route_triton(logits[token : token + 1], 3, normalize=True)
        assert torch.equal(alone.weights[0], together.weights[token])
        assert torch.equal(alone.ids[0], together.ids[token])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_sigmoids_choose_with_their_bias_and_weigh_without(has_bias: bool, normalize: bool) -> None:
    logits, bias = random(9, 6, scale=2.0), random(6, seed=1) if has_bias else None
    scores = Scores(bias, epsilon=0.5, scale=2.5)
    weights, ids = route(logits, 3, normalize=normalize, scores=scores)
    for row, its_weights, its_ids in zip(logits.double(), weights.double(), ids.tolist(), strict=True):
        chances = 1.0 / (1.0 + (-row).exp())
        choice = chances if bias is None else chances + bias.double()
        assert its_ids == sorted(range(6), key=lambda expert: -float(choice[expert]))[:3]
        expected = chances[its_ids] / (chances[its_ids].sum() + 0.5 if normalize else 1.0) * 2.5
        torch.testing.assert_close(its_weights, expected, atol=1e-6, rtol=1e-5)


def test_sigmoids_that_are_rounded_to_one_do_not_hide_the_best_logit(device: torch.device) -> None:
    logits = torch.tensor([[20.0, 40.0, -3.0, 30.0]], device=device)
    weights, ids = route(logits, 2, normalize=False, scores=Scores())
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[1.0, 1.0]]


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_triton(kernel_device: torch.device) -> Compute:
    from kernels.experts.triton.experts import experts_triton

    return experts_triton


@pytest.fixture(params=["torch", "triton"])
def compute(request: pytest.FixtureRequest) -> Compute:
    if request.param == "torch":
        return routed_experts
    in_triton: Compute = request.getfixturevalue("in_triton")
    return in_triton


class Case:
    """Random weights, and tokens that are routed at random."""

    def __init__(
        self, num_tokens: int, dtype: torch.dtype, device: torch.device, hidden: int = 32, inner: int = INNER
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

        self.hidden, self.gate_up = random(num_tokens, hidden), random(NUM_EXPERTS, 2 * inner, hidden)
        self.down = random(NUM_EXPERTS, hidden, inner)
        self.logits = random(num_tokens, NUM_EXPERTS) * 4

    def run(self, compute: Compute, tokens: slice = slice(None)) -> torch.Tensor:
        return compute(self.hidden[tokens], self.logits[tokens], self.gate_up, self.down, 3, normalize=False)

    def check(self, compute: Compute) -> None:
        got, tolerance = self.run(compute), TOLERANCES[self.hidden.dtype]
        routed = reference.route(self.logits, 3, normalize=False)
        expected = reference.experts(self.hidden, self.gate_up, self.down, *routed)
        assert got.dtype == self.hidden.dtype
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_each_token_gets_the_weighted_sum_of_its_experts(
    compute: Compute, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    Case(num_tokens, dtype, device).check(compute)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [2, 33])
def test_experts_without_a_gate_that_sigmoids_choose(
    compute: Compute, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    case, bias = Case(num_tokens, dtype, device), random(NUM_EXPERTS, seed=2).to(device)
    up, scores = case.gate_up[:, :INNER].contiguous(), Scores(bias, epsilon=1e-3, scale=2.5)
    output = compute(case.hidden, case.logits, up, case.down, 3, normalize=True, scores=scores, gated=False)
    expected = torch.zeros_like(case.hidden, dtype=torch.float64)
    weights, ids = route(case.logits, 3, normalize=True, scores=scores)
    for token, (its_weights, its_ids) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(its_weights, its_ids, strict=True):
            inner = (up[expert].double() @ case.hidden[token].double()).relu().square()
            expected[token] += weight * (case.down[expert].double() @ inner)
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("num_tokens", [2, 33])
def test_experts_with_gelu_whose_weights_are_scaled(compute: Compute, num_tokens: int, device: torch.device) -> None:
    """As in Gemma 4."""
    case, scale = Case(num_tokens, torch.float32, device), random(NUM_EXPERTS, seed=2).to(device)
    options = {"normalize": True, "activation": "gelu_tanh", "expert_scale": scale}
    output = compute(case.hidden, case.logits, case.gate_up, case.down, 3, **options)
    expected = torch.zeros_like(case.hidden, dtype=torch.float64)
    weights, ids = reference.route(case.logits, 3, normalize=True)
    for token, (its_weights, its_ids) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(its_weights, its_ids, strict=True):
            gate, up = (case.gate_up[expert].double() @ case.hidden[token].double()).chunk(2)
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            expected[token] += weight * scale[expert].double() * (case.down[expert].double() @ inner)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_tokens", [2, 33])
def test_weights_may_multiply_what_experts_read(
    compute: Compute, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As in Llama 4, of two experts here."""
    case, scores = Case(num_tokens, dtype, device), Scores()
    options: dict[str, Any] = {"normalize": False, "scores": scores, "scales_inputs": True}
    output = compute(case.hidden, case.logits, case.gate_up, case.down, 2, **options)
    routed = route(case.logits, 2, normalize=False, scores=scores)
    expected, otherwise = (
        reference.experts(case.hidden.double(), case.gate_up, case.down, *routed, scales_inputs=scales_inputs)
        for scales_inputs in (True, False)
    )
    error = (output.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCES[dtype] < 0.2 * (otherwise - expected).abs().max() / expected.abs().max()


def test_several_tiles_and_rows_of_several_blocks(compute: Compute, device: torch.device) -> None:
    Case(130, torch.float32, device, hidden=70, inner=35).check(compute)


@pytest.mark.parametrize("num_tokens", [1, 65])
def test_experts_without_a_token_and_some_with_all(compute: Compute, num_tokens: int, device: torch.device) -> None:
    case = Case(num_tokens, torch.float32, device)
    case.logits[:] = torch.tensor([0.0, 2.0, 0.0, 1.0, 3.0])  # experts 4, 1 and 3
    case.logits[0, 0] = 1.5
    case.check(compute)


def test_no_token_is_no_work(compute: Compute, device: torch.device) -> None:
    assert Case(0, torch.float32, device).run(compute).shape == (0, 32)


def test_hidden_states_may_have_a_stride(compute: Compute, device: torch.device) -> None:
    case = Case(3, torch.float32, device)
    case.hidden = torch.cat((case.hidden, case.hidden), dim=1)[:, :32]
    case.check(compute)


@pytest.mark.parametrize("num_tokens", [3, 70])
def test_a_token_has_the_same_bits_in_any_batch(num_tokens: int, in_triton: Compute, device: torch.device) -> None:
    case = Case(num_tokens, torch.float32, device, hidden=80)
    together = case.run(in_triton)
    for token in (0, num_tokens // 2, num_tokens - 1):
        assert torch.equal(case.run(in_triton, slice(token, token + 1))[0], together[token])

"""Experts on codes in Triton against the reference with the decoded weights, in every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, decode
from kernels.experts import reference
from kernels.experts.coded_stack import CodedStack
from kernels.experts.experts import routed_experts
from kernels.experts.route import Scores, route
from tests.kernels.coded_formats import any_format
from tests.kernels.coded_matrices import FORMATS, PLANTED, random_matrix

# Relative to the largest output: what rounding the weights, the features between the products and the result loses.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.float16, torch.bfloat16))]
IN_ORDER = {name: form for name, form in FORMATS.items() if not form.has_input_order}
NUM_EXPERTS, TOP_K = 4, 2


def scaled_matrix(form: CodeFormat, outputs: int, inputs: int, seed: int) -> CodedMatrix:
    """Return a random matrix whose products with features of N(0, 1) are about as large as these."""
    matrix = random_matrix(form, outputs, inputs, seed)
    factor = 1.0 / float(decode(matrix).square().sum(dim=1).mean().sqrt().clamp(min=1e-6))
    outer = {name: part for name, part in matrix.parts.items() if name in ("outer_scales", "outer_minima")}
    return matrix.with_parts(matrix.parts | {name: (part * factor).to(part.dtype) for name, part in outer.items()})


class Case:
    """Random coded weights, and tokens that are routed at random."""

    def __init__(
        self,
        form: CodeFormat,
        num_tokens: int,
        device: torch.device,
        *,
        hidden: int = 70,
        inner: int = 36,
        dtype: torch.dtype = torch.float32,
        down_format: CodeFormat | None = None,
        invariant: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        self.device, self.invariant = device, invariant
        self.hidden = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
        self.logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator) * 4
        self.up = [scaled_matrix(form, 2 * inner, hidden, seed) for seed in range(NUM_EXPERTS)]
        self.down = [scaled_matrix(down_format or form, hidden, inner, 9 + seed) for seed in range(NUM_EXPERTS)]

    def stack(self, matrices: list[CodedMatrix]) -> CodedStack:
        sections = [CodedStack.section(CodedWeight((matrix,)), matrix.shape[0], self.device) for matrix in matrices]
        stack = CodedStack(sections[0], len(sections), batch_invariant=self.invariant)
        for expert, section in enumerate(sections):
            stack.set_expert(expert, section)
        return stack

    def run(self, tokens: slice = slice(None), **options: Any) -> torch.Tensor:
        from kernels.experts.triton.experts import experts_triton

        weights = options.pop("weights", None) or (self.stack(self.up), self.stack(self.down))
        inputs = (self.hidden[tokens].to(self.device), self.logits[tokens].to(self.device))
        return experts_triton(*inputs, *weights, TOP_K, **{"normalize": True, **options}).cpu()

    def decoded(self, matrices: list[CodedMatrix]) -> torch.Tensor:
        return torch.stack([decode(matrix) for matrix in matrices]).double()

    def expected(self, *, scales_inputs: bool = False) -> torch.Tensor:
        routed = reference.route(self.logits, TOP_K, normalize=True)
        weights = self.decoded(self.up), self.decoded(self.down)
        return reference.experts(self.hidden.double(), *weights, *routed, scales_inputs=scales_inputs)

    def error(self, **options: Any) -> float:
        return error(self.run(**options), self.expected())


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_ORDER)
def test_matches_the_reference(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    case = Case(FORMATS[name], 3, kernel_device, dtype=dtype)
    got = case.run()
    assert got.dtype == dtype
    assert error(got, case.expected()) < TOLERANCES[dtype]


@pytest.mark.parametrize("num_tokens", [1, 30, 40])  # in tiles of 16 and 64 rows
@pytest.mark.parametrize("sizes", [pytest.param((35, 257), marks=pytest.mark.long), (257, 17)])
def test_odd_sizes_and_each_tile(num_tokens: int, sizes: tuple[int, int], kernel_device: torch.device) -> None:
    hidden, inner = sizes
    case = Case(FORMATS["Q4_K"], num_tokens, kernel_device, hidden=hidden, inner=inner, down_format=FORMATS["Q6_K"])
    assert case.error() < TOLERANCES[torch.float32]


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(
    any_format().filter(lambda form: not form.has_input_order),
    st.tuples(st.integers(1, 12), st.integers(1, 300), st.integers(1, 90)),
)
def test_any_format_matches_the_reference(
    kernel_device: torch.device, form: CodeFormat, sizes: tuple[int, int, int]
) -> None:
    num_tokens, hidden, inner = sizes
    case = Case(form, num_tokens, kernel_device, hidden=hidden, inner=inner)
    assert case.error() < TOLERANCES[torch.float32]


def test_experts_without_a_gate_that_sigmoids_choose(kernel_device: torch.device) -> None:
    case = Case(FORMATS["NVFP4"], 9, kernel_device)
    scores = Scores(torch.arange(NUM_EXPERTS) * 0.1, epsilon=1e-3, scale=2.5)
    options: dict[str, Any] = {"scores": scores, "gated": False, "normalize": True}
    on_device = Scores(torch.arange(NUM_EXPERTS, device=kernel_device) * 0.1, epsilon=1e-3, scale=2.5)
    expected = torch.zeros_like(case.hidden, dtype=torch.float64)
    weights, ids = route(case.logits, TOP_K, normalize=True, scores=scores)
    case.down = [scaled_matrix(FORMATS["NVFP4"], 70, 72, 9 + seed) for seed in range(NUM_EXPERTS)]
    up, down = case.decoded(case.up), case.decoded(case.down)
    for token, (its_weights, its_ids) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(its_weights, its_ids, strict=True):
            inner = (up[expert] @ case.hidden[token].double()).relu().square()
            expected[token] += weight * (down[expert] @ inner)
    assert error(case.run(**(options | {"scores": on_device})), expected) < TOLERANCES[torch.float32]


def test_weights_may_multiply_what_experts_read(kernel_device: torch.device) -> None:
    """As in Llama 4."""
    case = Case(FORMATS["FP8"], 9, kernel_device)
    expected, otherwise = (case.expected(scales_inputs=scales_inputs) for scales_inputs in (True, False))
    got = case.run(scales_inputs=True)
    assert error(got, expected) < TOLERANCES[torch.float32] < 0.1 * error(got, otherwise)


def test_experts_with_gelu(kernel_device: torch.device) -> None:
    """As in Gemma 4."""
    case = Case(FORMATS["Q4_0"], 9, kernel_device)
    weights = case.decoded(case.up), case.decoded(case.down)
    options: dict[str, Any] = {"normalize": True, "activation": "gelu_tanh"}
    expected = routed_experts(case.hidden.double(), case.logits, *weights, TOP_K, **options)
    assert error(case.run(activation="gelu_tanh"), expected) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("coded", ["up", "down"])
def test_one_of_the_matrices_may_be_plain(coded: str, kernel_device: torch.device) -> None:
    case = Case(FORMATS["Q4_K"], 9, kernel_device)
    weights = {name: case.decoded(getattr(case, name)).float().to(kernel_device) for name in ("up", "down")}
    stacks: dict[str, Any] = weights | {coded: case.stack(getattr(case, coded))}
    assert case.error(weights=(stacks["up"], stacks["down"])) < TOLERANCES[torch.float32]


def test_experts_without_a_token(kernel_device: torch.device) -> None:
    case = Case(FORMATS["Q4_K"], 20, kernel_device)
    case.logits[:] = torch.tensor([0.0, 2.0, 0.0, 3.0])
    assert case.error() < TOLERANCES[torch.float32]


@pytest.mark.parametrize("num_tokens", [3, 70])
def test_a_token_has_the_same_bits_in_any_batch_if_that_is_asked_for(
    num_tokens: int, kernel_device: torch.device
) -> None:
    case = Case(FORMATS["Q4_K"], num_tokens, kernel_device, invariant=True)
    weights = case.stack(case.up), case.stack(case.down)
    together = case.run(weights=weights)
    for token in (0, num_tokens // 2, num_tokens - 1):
        assert torch.equal(case.run(slice(token, token + 1), weights=weights)[0], together[token])


@pytest.mark.parametrize("stack", ["up", pytest.param("down", marks=pytest.mark.long)])
@pytest.mark.parametrize("planted", [name for name, (form, _) in PLANTED.items() if form in IN_ORDER])
def test_a_planted_error_is_seen(planted: str, stack: str, kernel_device: torch.device) -> None:
    name, change = PLANTED[planted]
    hidden, inner = (257, 8) if stack == "up" else (16, 257)
    case = Case(FORMATS[name], 2, kernel_device, hidden=hidden, inner=inner)
    expected = case.expected()
    setattr(case, stack, [change(matrix) for matrix in getattr(case, stack)])
    assert error(case.run(), expected) > 10 * TOLERANCES[torch.float32]


def test_another_experts_codes_are_seen(kernel_device: torch.device) -> None:
    case = Case(FORMATS["Q4_K"], 4, kernel_device)
    expected = case.expected()
    case.down = case.down[1:] + case.down[:1]
    assert error(case.run(), expected) > 0.1

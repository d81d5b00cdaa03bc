"""FP8 layers that quantise their activations: the kernels against the reference, and that within its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, decode
from kernels.linear.fp8 import GROUP, fp8_linear, group_of, quantize

if TYPE_CHECKING:
    from kernels.linear.fp8_triton import Fp8Linear

GROUPS = CodeFormat(bits=8, granules_per_outer=4, outer_type="float32", floats="e4m3", activations="groups")
TOKENS = replace(GROUPS, granules_per_outer=2**19, outer_type="bfloat16", activations="tokens")
SCALE = 0.02
SCHEMES = ("groups", "tokens", "one scale")
SHAPES = [(1, 80, 96), (17, 256, 304), (70, 130, 512), (131, 128, 160)]  # rows, outputs, inputs


def matrix_of(scheme: str, num_outputs: int, num_inputs: int, block: int = 128) -> CodedMatrix:
    """Return random weights with scales for blocks of outputs."""
    form, generator = GROUPS if scheme == "groups" else TOKENS, torch.Generator().manual_seed(num_outputs)
    codes = torch.randn(num_outputs, num_inputs, generator=generator).mul(60).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(-(-num_outputs // block), form.num_outers(num_inputs), generator=generator)
    return CodedMatrix(
        format=form,
        codes=codes.view(torch.uint8),
        outer_scales=scales.repeat_interleave(block, dim=0)[:num_outputs].to(form.outer_dtype),
        activation_scales=torch.full((num_outputs,), SCALE) if scheme == "one scale" else None,
    )


def layer_of(matrix: CodedMatrix, device: torch.device, *, invariant: bool = False) -> Fp8Linear:
    from kernels.linear.fp8_triton import Fp8Linear

    return Fp8Linear(CodedWeight((matrix,)), matrix.shape[0], device, batch_invariant=invariant)


def rows_of(count: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, columns, generator=generator) * torch.rand(count, 1, generator=generator)


def rounding_of(x: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
    """Return how much rounding of the activations may change each output: they keep three bits after the first."""
    scale = None if matrix.activation_scales is None else matrix.activation_scales[:1]
    _, scales = quantize(x, group_of(matrix), scale)
    steps = scales.t().repeat_interleave(group_of(matrix) or x.shape[1], dim=1)[:, : x.shape[1]] * 2.0**-10
    return torch.maximum(x.abs() / 16, steps).double() @ decode(matrix).abs().double().t()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_is_within_the_bound_of_rounding(scheme: str) -> None:
    for num_rows, num_outputs, num_inputs in SHAPES:
        matrix, x = matrix_of(scheme, num_outputs, num_inputs), rows_of(num_rows, num_inputs)
        exact = x.double() @ decode(matrix).double().t()
        errors = (fp8_linear(x, matrix).double() - exact).abs() / rounding_of(x, matrix)
        assert 0.01 < float(errors.max()) < 1.0


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_matches_the_reference(scheme: str, invariant: bool, kernel_device: torch.device) -> None:
    for index, (num_rows, num_outputs, num_inputs) in enumerate(SHAPES):
        matrix, x = matrix_of(scheme, num_outputs, num_inputs), rows_of(num_rows, num_inputs)
        layer, expected = layer_of(matrix, kernel_device, invariant=invariant), fp8_linear(x, matrix)
        if index % 2:
            bias = rows_of(1, num_outputs)[0]
            layer.bias, expected = nn.Parameter(bias.to(kernel_device), requires_grad=False), expected + bias
        magnitudes = x.abs() @ decode(matrix).abs().t()
        assert float(((layer(x.to(kernel_device)).cpu() - expected).abs() / magnitudes).max()) < 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_scales_of_activations_are_the_references(scheme: str, kernel_device: torch.device) -> None:
    matrix, x = matrix_of(scheme, 64, 304), rows_of(9, 304)
    x[2], x[3, :5], x[4, 0], x[5] = 0.0, torch.tensor([1e-3, -1e-3, 6e4, -0.0, 1e-30]), 1e30, x[5] * 1e-35
    codes, scales = layer_of(matrix, kernel_device).quantize(x.to(kernel_device), 12)
    scale = torch.full((1,), SCALE) if scheme == "one scale" else None
    expected_codes, expected_scales = quantize(x, group_of(matrix), scale)
    assert torch.equal(codes[:9].cpu().view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales[:, :9].cpu(), expected_scales)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_has_the_same_bits_in_any_batch_if_that_is_asked_for(scheme: str, kernel_device: torch.device) -> None:
    layer = layer_of(matrix_of(scheme, 70, 304), kernel_device, invariant=True)
    x = rows_of(140, 304).to(kernel_device)
    together = layer(x)
    for start, end in ((0, 1), (63, 64), (100, 140)):
        assert torch.equal(layer(x[start:end]), together[start:end])


def test_strided_rows_no_rows_and_outputs_without_weights(kernel_device: torch.device) -> None:
    from kernels.linear.fp8_triton import Fp8Linear

    matrix, x = matrix_of("groups", 40, 160), rows_of(3, 160).to(kernel_device)
    layer = Fp8Linear(CodedWeight((matrix,)), 50, kernel_device)
    assert torch.equal(layer(torch.cat([x, x.log()], dim=1)[:, :160]), layer(x))
    assert not layer(x)[:, 40:].any()
    assert layer(x.view(1, 3, 160)).shape == (1, 3, 50)
    assert layer(x[:0]).shape == (0, 50)


def test_which_weights_it_computes(kernel_device: torch.device) -> None:
    from kernels.linear.fp8_triton import can_multiply_fp8

    device = torch.device("cpu")
    matrix = matrix_of("groups", 40, 160)
    assert can_multiply_fp8(CodedWeight((matrix,)), device)
    assert not can_multiply_fp8(CodedWeight((matrix_of("groups", 40, 150),)), device)  # not loaded 16 bytes at a time
    assert not can_multiply_fp8(CodedWeight((matrix, matrix_of("tokens", 40, 160))), device)
    plain = replace(matrix, format=replace(GROUPS, activations=None))
    assert not can_multiply_fp8(CodedWeight((plain,)), device)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes >> 4 | codes << 4


PLANTED: dict[str, Callable[[CodedMatrix], CodedMatrix]] = {
    "the next group's scale": lambda m: replace(m, outer_scales=m.outer_scales.roll(1, dims=1)),
    "the next block's scale": lambda m: replace(m, outer_scales=m.outer_scales.roll(GROUP, dims=0)),
    "halves of bytes are swapped": lambda m: replace(m, codes=_nibbles(m.codes)),
    "no group at the end": lambda m: replace(m, codes=torch.where(torch.arange(304) < 256, m.codes, 0)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_seen(planted: str, kernel_device: torch.device) -> None:
    matrix, x = matrix_of("groups", 256, 304), rows_of(4, 304)
    wrong = layer_of(PLANTED[planted](matrix), kernel_device)(x.to(kernel_device)).cpu()
    magnitudes = x.abs() @ decode(matrix).abs().t()
    error = ((wrong - fp8_linear(x, matrix)).abs() / magnitudes).max()
    assert not float(error) <= 1e-2  # some swapped bytes are NaN

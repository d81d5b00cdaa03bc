"""Linear layers on codes in Triton against torch's product with the decoded weights, in every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, decode
from kernels.linear.coded_sections import CodedSection
from tests.kernels.coded_formats import any_format
from tests.kernels.coded_matrices import FORMATS, PLANTED, random_matrix

if TYPE_CHECKING:
    from kernels.linear.coded_triton import CodedTritonLinear

# Relative to the sums of absolute products: what the weights, rounded to the dtype, and the result, lose. Triton's
# interpreter rounds to bfloat16 towards zero, and loses twice as much.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 16e-3}
SHAPES = [(1, 80, 96), (17, 70, 600), (65, 17, 257), (130, 130, 70), (3, 64, 1024)]  # rows, outputs, inputs
BITS = {"Q4_0": 4.5, "Q4_K": 4.625, "Q2_K": 3.125, "Q6_K": 8.5625, "Q8_0": 8.5, "NVFP4": 5.0, "GPTQ": 4.1875}


def layer_of(
    device: torch.device, *matrices: CodedMatrix, bias: torch.Tensor | None = None, invariant: bool = False
) -> CodedTritonLinear:
    from kernels.linear.coded_triton import CodedTritonLinear

    num_outputs = sum(matrix.shape[0] for matrix in matrices)
    layer = CodedTritonLinear(CodedWeight(matrices), num_outputs, device, batch_invariant=invariant)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(device), requires_grad=False)
    return layer


def rows_of(count: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def error(x: torch.Tensor, layer: CodedTritonLinear, *matrices: CodedMatrix) -> float:
    """Return the largest error of the layer's results, relative to the sum of the absolute products."""
    weight = torch.cat([decode(matrix) for matrix in matrices]).double()
    wanted, magnitudes = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    if layer.bias is not None:
        wanted, magnitudes = wanted + layer.bias.cpu().double(), magnitudes + layer.bias.cpu().double().abs()
    device = next(layer.parameters()).device
    product = layer(x.to(device)).cpu()
    assert product.dtype == x.dtype
    return float(((product.double() - wanted).abs() / magnitudes.clamp(min=1e-6)).max())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", FORMATS)
def test_matches_torch(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    for index, (num_rows, outputs, inputs) in enumerate(SHAPES):
        matrix = random_matrix(FORMATS[name], outputs, inputs)
        bias = rows_of(1, outputs, dtype)[0] if index % 2 else None
        layer = layer_of(kernel_device, matrix, bias=bias)
        assert error(rows_of(num_rows, inputs, dtype), layer, matrix) < TOLERANCES[dtype]


@settings(deadline=None, max_examples=25)
@given(
    any_format(),
    st.tuples(st.integers(1, 20), st.integers(1, 90), st.integers(1, 900)),
)
def test_any_format_matches_torch(kernel_device: torch.device, form: CodeFormat, sizes: tuple[int, int, int]) -> None:
    num_rows, outputs, inputs = sizes
    matrix = random_matrix(form, outputs, inputs)
    assert error(rows_of(num_rows, inputs), layer_of(kernel_device, matrix), matrix) < 2e-6


@pytest.mark.parametrize("name", ["Q4_K", "NVFP4"])
def test_a_row_has_the_same_bits_in_any_batch_of_a_tile(name: str, kernel_device: torch.device) -> None:
    layer = layer_of(kernel_device, random_matrix(FORMATS[name], 70, 600))
    for dtype, most in ((torch.bfloat16, 16), (torch.float32, 16)):
        x = rows_of(most, 600, dtype).to(kernel_device)
        together = layer(x)
        for start, end in ((0, 1), (most - 1, most), (3, 12)):
            assert torch.equal(layer(x[start:end]), together[start:end])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_any_batch_if_that_is_asked_for(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    layer = layer_of(kernel_device, random_matrix(FORMATS["Q4_K"], 70, 600), invariant=True)
    x = rows_of(200, 600, dtype).to(kernel_device)
    together = layer(x)
    for start, end in ((0, 1), (63, 64), (130, 200), (5, 77)):
        assert torch.equal(layer(x[start:end]), together[start:end])


def test_sections_have_formats_of_their_own(kernel_device: torch.device) -> None:
    matrices = [random_matrix(FORMATS[name], size, 520) for name, size in (("Q4_K", 33), ("Q6_K", 70), ("Q4_0", 1))]
    layer = layer_of(kernel_device, *matrices, bias=rows_of(1, 104)[0])
    for num_rows in (1, 70):
        assert error(rows_of(num_rows, 520), layer, *matrices) < TOLERANCES[torch.float32]


def test_outputs_without_weights_are_zero(kernel_device: torch.device) -> None:
    from kernels.linear.coded_triton import CodedTritonLinear

    for name in ("Q4_K", "NVFP4", "GPTQ"):
        matrix, x = random_matrix(FORMATS[name], 40, 100), rows_of(3, 100).to(kernel_device)
        product = CodedTritonLinear(CodedWeight((matrix,)), 50, kernel_device)(x)
        assert torch.equal(product[:, :40], layer_of(kernel_device, matrix)(x))
        assert not product[:, 40:].any()


def test_strided_rows_and_no_rows(kernel_device: torch.device) -> None:
    layer, x = layer_of(kernel_device, random_matrix(FORMATS["Q4_K"], 40, 100)), rows_of(6, 100).to(kernel_device)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    assert torch.equal(layer(wide[:, :100]), layer(x))
    assert torch.equal(layer(x.t().contiguous().t()), layer(x))
    assert layer(x.view(2, 3, 100)).shape == (2, 3, 40)
    assert layer(x[:0]).shape == (0, 40)


def test_a_nan_in_a_row_is_not_lost(kernel_device: torch.device) -> None:
    layer, x = layer_of(kernel_device, random_matrix(FORMATS["Q4_0"], 64, 96)), rows_of(3, 96)
    x[1, 50] = torch.nan
    results = layer(x.to(kernel_device)).isnan().cpu()
    assert results[1].all()
    assert not results[[0, 2]].any()


@pytest.mark.parametrize("name", BITS)
def test_weights_take_few_bits(name: str) -> None:
    matrix = random_matrix(FORMATS[name], 128, 2048)
    section = CodedSection(matrix, 128, torch.device("cpu"))
    num_bytes = sum(parameter.nbytes for parameter in section.parameters() if parameter.dim() > 1)
    assert 8 * num_bytes / matrix.codes.numel() == BITS[name]


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_seen(planted: str, kernel_device: torch.device) -> None:
    name, change = PLANTED[planted]
    matrix = random_matrix(FORMATS[name], 64, 257)
    assert error(rows_of(4, 257), layer_of(kernel_device, change(matrix)), matrix) > 10 * TOLERANCES[torch.float32]

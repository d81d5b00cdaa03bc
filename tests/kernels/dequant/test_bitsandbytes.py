"""Products with NF4 and FP4 as levels of a byte: what they are wrong by, beside the table's numbers in float32."""

from __future__ import annotations

import pytest
import torch

from kernels.coded_weight import CodedMatrix, CodedWeight, Section, decode
from kernels.cpu.coded_linear import CodedLinear
from kernels.cpu.library import library
from kernels.cpu.linear import linear
from kernels.dequant.bit_fields import fields
from kernels.dequant.bitsandbytes import byte_levels
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from tests.engine.models.checkpoint.formats.test_bitsandbytes import four_bits

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler is installed")


def coded(kind: str, weight: torch.Tensor) -> tuple[CodedMatrix, torch.Tensor, torch.Tensor]:
    """Return a weight as codes, the numbers that they stand for, and what each level may be wrong by."""
    encoded, num_rows = four_bits(weight, kind, is_nested=False), len(weight)
    levels = byte_levels(tuple(encoded.tensors["weight.quant_map"].tolist()))
    assert levels is not None
    form = format_of_groups(4, 64, weight.shape[1], torch.float32, zero=128.0, levels=levels.levels)
    assert form is not None
    assert encoded.code_error is not None
    codes = fields(encoded.tensors["weight"].view(num_rows, -1), 4, 1, is_high_first=True)
    scales = encoded.tensors["weight.absmax"].view(num_rows, -1) * levels.scale
    return coded_groups(form, codes, scales), encoded.values, encoded.code_error


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_product_is_wrong_by_roundings_of_activations_and_levels(kind: str, num_rows: int) -> None:
    """An activation is rounded by 1 / 254 of its block's largest at most, and a level as `code_error` says."""
    generator = torch.Generator().manual_seed(num_rows)
    matrix, values, level_error = coded(kind, torch.randn(80, 256, generator=generator))
    x = torch.randn(num_rows, 256, generator=generator)
    layer = CodedLinear([Section(matrix.format, 80)], 256, 80)
    layer.set_weight(CodedWeight((matrix,)))
    errors = (linear(x, layer).double() - x.double() @ values.double().t()).abs()
    row_error = x.view(num_rows, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).reshape(num_rows, -1) / 254
    bound = row_error @ decode(matrix).abs().t() + x.abs() @ level_error.t()
    rounding = 1e-5 * x.abs() @ values.abs().t()
    assert (errors <= bound + rounding).all()
    assert float(errors.norm() / (x.double() @ values.double().t()).norm()) < 0.01


def test_codes_are_unpacked_with_the_first_in_the_high_half() -> None:
    assert fields(torch.tensor([[0x12, 0xF0]], dtype=torch.uint8), 4, 1, is_high_first=True).tolist() == [[1, 2, 15, 0]]

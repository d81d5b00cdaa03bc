"""Linear layers on codes against the reference, in every format; and what a planted error changes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, Section, decode
from kernels.cpu import reference
from kernels.cpu.coded_linear import SECTION_OUTPUTS, CodedLinear, quantize_codes
from kernels.cpu.gather import gather_packed_rows
from kernels.cpu.linear import has_tiles, linear
from tests.kernels.coded_formats import any_format
from tests.kernels.coded_matrices import FORMATS, PLANTED, random_matrix

# Relative to the sums of absolute products: levels and minima are multiplied apart, and nearly cancel.
TOLERANCE = 3e-6


def packed(*matrices: CodedMatrix, in_features: int | None = None) -> CodedLinear:
    sections = [Section(matrix.format, len(matrix.codes)) for matrix in matrices]
    columns = in_features or matrices[0].shape[1]
    layer = CodedLinear(sections, columns, sum(section.num_outputs for section in sections))
    layer.set_weight(CodedWeight(matrices))
    return layer


def rows_of(count: int, columns: int) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count))


def _without_zeros(matrix: CodedMatrix) -> CodedMatrix:
    """Return a weight whose numbers are scale * level."""
    zeros = {
        name: torch.zeros_like(part) for name, part in matrix.parts.items() if name in ("zero_points", "outer_minima")
    }
    return replace(matrix.with_parts(matrix.parts | zeros), format=replace(matrix.format, zero=0.0))


def error(x: torch.Tensor, layer: CodedLinear, *matrices: CodedMatrix) -> float:
    """Return the largest error of the layer's results, relative to the sum of the absolute products."""
    wanted = torch.cat([reference.coded_linear(x, matrix) for matrix in matrices], dim=1)
    rows = reference.coded_rows(x, matrices[0].format).abs().double()
    terms = [rows @ (decode(m).abs() + decode(_without_zeros(m)).abs()).double().t() for m in matrices]
    magnitudes = torch.cat(terms, dim=1)
    return float(((linear(x, layer) - wanted).abs() / magnitudes.clamp(min=1e-6)).max())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_rows", "outputs", "inputs"), [(1, 80, 96), (6, 17, 600), (7, 130, 70), (37, 200, 257)])
def test_equals_the_reference(name: str, num_rows: int, outputs: int, inputs: int) -> None:
    matrix, x = random_matrix(FORMATS[name], outputs, inputs), rows_of(num_rows, inputs)
    assert error(x, packed(matrix), matrix) < TOLERANCE


@settings(deadline=None, max_examples=60)
@given(
    any_format(),
    st.tuples(st.integers(1, 20), st.integers(1, 90), st.integers(1, 700)),
)
def test_any_format_equals_the_reference(form: CodeFormat, sizes: tuple[int, int, int]) -> None:
    num_rows, outputs, inputs = sizes
    matrix, x = random_matrix(form, outputs, inputs), rows_of(num_rows, inputs)
    assert error(x, packed(matrix), matrix) < TOLERANCE


@pytest.mark.parametrize("name", ["FP8", "E5M2"])
def test_every_float_is_multiplied_exactly(name: str) -> None:
    """Also the smallest ones, whose exponent is 0."""
    form = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8).expand(64, -1).contiguous()
    codes[~codes.view(form.code_dtype).float().isfinite()] = 0
    scales = torch.full((64, form.num_outers(256)), 0.75, dtype=form.outer_dtype)
    matrix, x = CodedMatrix(format=form, codes=codes, outer_scales=scales), torch.eye(256)
    layer, numbers = packed(matrix), codes.view(form.code_dtype).float() * 0.75
    assert torch.equal(linear(x, layer), numbers.t())
    assert torch.equal(torch.cat([linear(row[None], layer) for row in x]), numbers.t())


@pytest.mark.skipif(not has_tiles(), reason="this processor has no tiles")
@pytest.mark.parametrize("name", ["FP8", "FP8 by output", "E5M2"])
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_tiles_add_floats_in_the_order_of_the_reference(name: str, num_rows: int) -> None:
    matrix, x = random_matrix(FORMATS[name], 70, 300), rows_of(num_rows, 300)
    assert torch.equal(linear(x, packed(matrix)), reference.tiled_coded_linear(x, matrix))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_number_of_rows(name: str, num_threads: int) -> None:
    layer = packed(random_matrix(FORMATS[name], 150, 600))
    x = rows_of(40, 600)
    together = linear(x, layer)
    for count in (1, 2, 5, 6, 7, 17):
        assert torch.equal(linear(x[:count], layer), together[:count])
    assert torch.equal(torch.cat([linear(row[None], layer) for row in x]), together)


def test_sections_have_formats_of_their_own() -> None:
    first = random_matrix(FORMATS["Q4_K"], 2 * SECTION_OUTPUTS, 512, seed=1)
    second = random_matrix(FORMATS["Q6_K"], 40, 512, seed=2)
    for num_rows in (1, 9):
        x = rows_of(num_rows, 512)
        assert error(x, packed(first, second), first, second) < TOLERANCE


def test_halves_are_interleaved_and_shorter_rows_padded() -> None:
    form, size = FORMATS["Q5_1"], 48
    matrix = random_matrix(form, 2 * size, 200)
    layer = CodedLinear([Section(form, 2 * size)], 208, 2 * size)
    for offset, half in enumerate(CodedWeight((matrix,)).chunk(2)):
        layer.set_weight(half, every=2, offset=offset)
    x = rows_of(3, 208)
    panels = linear(x, layer).view(3, -1, 2, 16)
    own = torch.cat((panels[:, :, 0].flatten(1), panels[:, :, 1].flatten(1)), dim=1)
    x[:, 200:] = 0
    wanted = reference.coded_linear(rows_of(3, 208)[:, :200], matrix)
    assert torch.allclose(own, wanted, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_an_embedding_are_decoded(name: str) -> None:
    matrix = random_matrix(FORMATS[name], 70, 600)
    ids = torch.tensor([0, 69, 16, 16])
    assert torch.allclose(gather_packed_rows(packed(matrix), ids, 2.0), 2 * decode(matrix)[ids], rtol=1e-5, atol=1e-6)


def test_a_nan_in_a_row_is_not_lost() -> None:
    layer, x = packed(random_matrix(FORMATS["Q4_0"], 64, 96)), rows_of(3, 96)
    x[1, 50] = torch.nan
    results = linear(x, layer).isnan()
    assert results[1].all()
    assert not results[[0, 2]].any()


def test_tiny_activations_give_zeros_and_tiny_weights_too() -> None:
    assert not linear(torch.full((2, 96), 1e-37), packed(random_matrix(FORMATS["Q4_0"], 64, 96))).any()
    assert not decode(quantize_codes(torch.full((16, 64), 1e-36), 4)).any()


@pytest.mark.parametrize("number", [5.0, -5.0])
def test_groups_of_equal_weights_are_kept(number: float) -> None:
    assert torch.allclose(decode(quantize_codes(torch.full((16, 64), number), 4)), torch.tensor(number), rtol=5e-3)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e18, 3e37])
def test_weights_of_any_size_are_quantized_as_well(size: float) -> None:
    weight = rows_of(64, 96) / 4
    values = decode(quantize_codes(weight * size, 4)) / size
    assert float((values - weight).norm() / weight.norm()) < 0.1


def test_the_panels_layout_is_that_of_c() -> None:
    """What Python writes, C reads: each kind of factor is seen by a result."""
    for name in FORMATS:
        matrix = random_matrix(FORMATS[name], 64, 300)
        for part in matrix.parts:
            changed = matrix.with_parts(matrix.parts | {part: matrix.parts[part].flip(0)})
            assert error(rows_of(2, 300), packed(changed), changed) < TOLERANCE
            assert error(rows_of(2, 300), packed(changed), matrix) > TOLERANCE


def test_zeros_give_zeros() -> None:
    assert not linear(torch.zeros(2, 96), packed(random_matrix(FORMATS["Q4_K"], 64, 96))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_weights_are_quantized_as_the_reference_does(bits: int, dtype: torch.dtype) -> None:
    weight = rows_of(200, 130).to(dtype)
    weight[3, 32:64] = 0
    ours, wanted = quantize_codes(weight, bits), reference.quantize_codes(weight, bits)
    assert ours.format == wanted.format
    same = ours.outer_scales == wanted.outer_scales  # else two candidates are as good but for the rounding of sums
    assert float(same.float().mean()) > 0.98
    errors = [(decode(matrix) - weight.float()).square().sum() for matrix in (ours, wanted)]
    assert float(errors[0]) == pytest.approx(float(errors[1]), rel=1e-3)
    assert not decode(ours)[3, 32:64].any()


def test_searched_scales_are_better_than_those_of_the_largest_number() -> None:
    weight = rows_of(100, 256)
    groups = weight.view(-1, 32)
    scales = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True)) / -8
    plain = ((groups / scales).round().clamp(-8, 7) * scales).view_as(weight)
    searched = decode(quantize_codes(weight, 4))
    assert (searched - weight).square().sum() < 0.9 * (plain - weight).square().sum()


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_seen(planted: str) -> None:
    name, change = PLANTED[planted]
    matrix = random_matrix(FORMATS[name], 64, 257)
    assert error(rows_of(4, 257), packed(change(matrix)), matrix) > 10 * TOLERANCE


COMPILES = pytest.mark.exhaustive("compiles the whole library for another processor")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("-march=x86-64-v3", marks=pytest.mark.long),
        pytest.param("-march=x86-64", marks=COMPILES),
        pytest.param("-march=skylake-avx512", marks=COMPILES),
    ],
)
def test_other_instruction_sets_equal_the_reference(flags: str) -> None:
    """AVX2 has loops of its own; AVX-512 without VNNI and any other processor have other products of bytes."""
    if "avx512" in flags and "avx512bw" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX-512")
    names = (
        "test_equals_the_reference",
        "test_any_format_equals_the_reference",
        "test_every_float_is_multiplied_exactly",
    )
    tests = [f"{__file__}::{name}" for name in names]
    tests.append(str(Path(__file__).with_name("test_stored_codes.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *tests]
    outcome = subprocess.run(command, env=os.environ | {"PAGODA_CPU_CFLAGS": flags}, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout

"""Packing of codes as files have them, against the same codes a byte each; and hostile sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, Section, StoredLayout
from kernels.cpu.coded_linear import CodedLinear
from kernels.cpu.stored_codes import is_gguf_finite, largest_magnitude, largest_octet
from kernels.dequant.gguf import FORMATS as GGUF_FORMATS
from kernels.dequant.gguf_types import GGUF_TYPES
from kernels.dequant.stored import unpacked
from tests.kernels.coded_matrices import FORMATS, LEVELS, packed_words, random_matrix

GGUF = {kind.name: kind for kind in GGUF_TYPES.values() if kind.name in GGUF_FORMATS}
NIBBLES = CodeFormat(bits=4, granules_per_outer=4, outer_type="float32", zero=8.0)
LAYOUTS: dict[str, tuple[CodeFormat, StoredLayout]] = {
    "bytes": (FORMATS["FP8"], StoredLayout("bytes")),
    "MXFP8": (FORMATS["MXFP8"], StoredLayout("bytes", "e8m0")),
    "signed bytes": (FORMATS["groups of 512"], StoredLayout("signed bytes")),
    "nibbles": (FORMATS["GPTQ"], StoredLayout("nibbles")),
    "high nibbles": (NIBBLES, StoredLayout("high nibbles")),
    "NVFP4": (replace(FORMATS["NVFP4"], has_output_scales=False), StoredLayout("nibbles", "e4m3 halves")),
    "MXFP4": (
        CodeFormat(bits=4, outer_type="bfloat16", zero=12.0, levels=LEVELS),
        StoredLayout("nibbles", "e8m0 halves"),
    ),
}


def stored_matrix(name: str, num_rows: int, columns: int) -> CodedMatrix:
    """Return a matrix with random bytes, whose last ones may have more codes than there are columns."""
    generator = torch.Generator().manual_seed(num_rows * columns)
    if (kind := GGUF.get(name)) is not None:
        columns = -(-columns // kind.block_elements) * kind.block_elements
        codes = torch.randint(0, 256, (num_rows, kind.row_bytes(columns)), dtype=torch.uint8, generator=generator)
        for block in codes.view(-1, kind.block_bytes):
            if not is_gguf_finite(block, kind):
                block &= 0xBF  # the sign of a NaN is not kept
        form, none = GGUF_FORMATS[name], torch.empty(num_rows, 0, dtype=GGUF_FORMATS[name].outer_dtype)
        layout = StoredLayout(name)
        return CodedMatrix(format=form, codes=codes, outer_scales=none, layout=layout, stored_inputs=columns)
    form, layout = LAYOUTS[name]
    matrix, is_pair = random_matrix(form, num_rows, columns), "nibbles" in layout.codes
    octets = -(-columns // 2) + 3 if is_pair else columns + 5
    parts = matrix.parts | {"codes": torch.randint(0, 256, (num_rows, octets), dtype=torch.uint8, generator=generator)}
    if layout.scales is not None:
        parts["outer_scales"] = (parts["outer_scales"].view(torch.uint8)[:, ::2] & 0x7E).contiguous()
    return CodedMatrix(format=form, layout=layout, stored_inputs=columns, **parts)


NAMES = [*LAYOUTS, *GGUF]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_rows", "columns", "first"), [(1, 33, 0), (16, 256, 0), (70, 544, 16), (37, 801, 5)])
def test_equals_codes_of_a_byte(name: str, num_rows: int, columns: int, first: int) -> None:
    matrix = stored_matrix(name, num_rows, columns)
    assert torch.equal(packed_words(matrix, first), packed_words(unpacked(matrix), first))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(1, 700), st.integers(0, 35))
def test_any_size_equals_codes_of_a_byte(name: str, num_rows: int, columns: int, first: int) -> None:
    matrix = stored_matrix(name, num_rows, columns)
    assert torch.equal(packed_words(matrix, first), packed_words(unpacked(matrix), first))


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_weight_are_packed_one_by_one(name: str) -> None:
    """Outputs that share a panel keep what is there; halves may alternate; rows may be shorter than the layer's."""
    matrix = stored_matrix(name, 100, 512)
    sections = [Section(matrix.format, 100)]
    whole, parts = CodedLinear(sections, 512, 100), CodedLinear(sections, 512, 100)
    whole.set_weight(CodedWeight((unpacked(matrix),)))
    for start, stop in ((24, 77), (0, 24), (77, 100)):
        parts.set_weight(CodedWeight((matrix.rows(slice(start, stop)),)), first_output=start)
    assert torch.equal(parts.words, whole.words)


@pytest.mark.parametrize("name", NAMES)
def test_halves_are_interleaved_and_shorter_rows_padded(name: str) -> None:
    matrix = stored_matrix(name, 96, 500)
    words = []
    for own in (matrix, unpacked(matrix)):
        layer = CodedLinear([Section(matrix.format, 96)], 1056, 96)
        for offset, half in enumerate(CodedWeight((own,)).chunk(2)):
            layer.set_weight(half, every=2, offset=offset)
        words.append(layer.words)
    assert torch.equal(*words)


@pytest.mark.parametrize("name", GGUF)
def test_scales_that_are_not_finite_are_seen(name: str) -> None:
    kind, form = GGUF[name], GGUF_FORMATS[name]
    blocks = torch.randint(0, 256, (300, kind.block_bytes), dtype=torch.uint8) & 0x3B
    assert is_gguf_finite(blocks, kind)
    for index in (0, 150, 299):
        for octet in range(kind.block_bytes):
            own = blocks.clone()
            own[index, octet] = 0xFC
            matrix = CodedMatrix(
                format=form,
                codes=own,
                outer_scales=torch.empty(300, 0, dtype=form.outer_dtype),
                layout=StoredLayout(name),
                stored_inputs=kind.block_elements,
            )
            parts = unpacked(matrix).parts
            factors = [parts[part].float().abs().max() for part in ("outer_scales", "outer_minima") if part in parts]
            assert is_gguf_finite(own, kind) == all(bool(factor < 3e38 / 2**16) for factor in factors)


@pytest.mark.parametrize("count", [0, 1, 63, 4097])
def test_the_largest_octet(count: int) -> None:
    octets = torch.randint(0, 256, (count,), dtype=torch.uint8)
    for mask in (0x7F, 0xFF):
        assert largest_octet(octets, mask) == max((octet & mask for octet in octets.tolist()), default=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_magnitude(dtype: torch.dtype) -> None:
    assert largest_magnitude(torch.empty(0, 3, dtype=dtype)) == 0
    for count in (1, 15, 4097):
        numbers = torch.randn(count).to(dtype)
        assert largest_magnitude(numbers) == float(numbers.abs().max())
        assert largest_magnitude(numbers.expand(3, -1)) == largest_magnitude(numbers)
        for special in (-torch.inf, torch.nan, -torch.finfo(dtype).max):
            numbers[count // 2] = special
            assert str(largest_magnitude(numbers)) == str(float(numbers.abs().max()))

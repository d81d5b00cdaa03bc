"""Coded weights that Triton decodes into memory, in every format, and products of many rows with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from kernels.coded_weight import CodedMatrix, CodedWeight, decode
from kernels.linear.coded_sections import CodedSection
from tests.kernels.coded_matrices import FORMATS, PLANTED, random_matrix

if TYPE_CHECKING:
    from kernels.linear.coded_triton import CodedTritonLinear

# Relative to the largest weight, or result: what rounding to the dtype loses. Triton's interpreter rounds to bfloat16
# towards zero, and loses twice as much.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.float16, torch.bfloat16))]
SHAPES = [(80, 96), (70, 600), (17, 257), (140, 512)]  # outputs, inputs
MANY_ROWS = 300


def decoded(matrix: CodedMatrix, dtype: torch.dtype, device: torch.device, rows: slice = slice(None)) -> torch.Tensor:
    """Return some of a matrix's outputs, after a check that nothing is written before and after them."""
    from kernels.linear.coded_decode import decode_outputs

    num_outputs, num_inputs = matrix.shape
    first, stop, _ = rows.indices(num_outputs)
    section = CodedSection(matrix, num_outputs, device)
    memory = torch.full((stop - first + 2, num_inputs), torch.nan, dtype=dtype, device=device)
    decode_outputs(memory[1:-1], section, first)
    assert memory[[0, -1]].isnan().all()
    return memory[1:-1].cpu()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_decodes_as_torch_does(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    for outputs, inputs in SHAPES:
        matrix = random_matrix(FORMATS[name], outputs, inputs)
        expected = decode(matrix)
        if matrix.input_order is not None:  # the codes lie in this order
            expected = expected[:, matrix.input_order.long()]
        assert error(decoded(matrix, dtype, kernel_device), expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("rows", [slice(0, 1), slice(5, 70), slice(128, 290), slice(299, 300)])
def test_decodes_some_outputs(rows: slice, kernel_device: torch.device) -> None:
    matrix = random_matrix(FORMATS["Q4_K"], 300, 520)
    assert error(decoded(matrix, torch.float32, kernel_device, rows), decode(matrix)[rows]) < 1e-6


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "desc_act"])
def test_rows_of_an_embedding_are_looked_up(name: str, kernel_device: torch.device) -> None:
    from kernels.linear.coded_decode import decode_rows

    matrix = random_matrix(FORMATS[name], 90, 300)
    section = CodedSection(matrix, 96, kernel_device)  # the last ids have no weights
    for ids in ([], [89], [5, 5, 0, 88, *range(30, 50)]):
        rows = decode_rows(section, torch.tensor(ids, dtype=torch.int64, device=kernel_device), torch.float32)
        assert rows.shape == (len(ids), 300)
        if ids:
            assert error(rows.cpu(), decode(matrix)[ids]) < TOLERANCES[torch.float32]
    assert not decode_rows(section, torch.tensor([95], device=kernel_device), torch.float32).any()


@pytest.mark.parametrize("planted", [name for name, (form, _) in PLANTED.items() if form != "desc_act"])
def test_a_planted_error_is_seen(planted: str, kernel_device: torch.device) -> None:
    name, change = PLANTED[planted]
    matrix = random_matrix(FORMATS[name], 64, 257)
    assert error(decoded(change(matrix), torch.float32, kernel_device), decode(matrix)) > 10 * TOLERANCES[torch.float32]


# --- many rows -------------------------------------------------------------------------------------------------------


def layer_of(matrices: list[CodedMatrix], device: torch.device, *, invariant: bool = False) -> CodedTritonLinear:
    from kernels.linear.coded_triton import CodedTritonLinear

    num_outputs = sum(matrix.shape[0] for matrix in matrices)
    return CodedTritonLinear(CodedWeight(tuple(matrices)), num_outputs, device, batch_invariant=invariant)


def product_and_decodes(
    layer: CodedTritonLinear, rows: torch.Tensor, scratch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[int]]:
    """Return a layer's results, and how many outputs were decoded at a time."""
    from kernels.linear import coded_decode, coded_triton

    counts: list[int] = []

    def counted(weight: torch.Tensor, section: CodedSection, first_output: int) -> None:
        counts.append(len(weight))
        coded_decode.decode_outputs(weight, section, first_output)

    monkeypatch.setattr(coded_triton, "decode_outputs", counted)
    layer.scratch = scratch.fill_(torch.nan)
    return layer(rows), counts


@pytest.mark.parametrize(
    ("num_elements", "counts"),
    [
        (200 * 520, [33, 136, 31]),  # all at once
        (199 * 520, [33, 95, 41, 31]),  # 128 outputs of several sections, and the rest of them
        (128 * 520, [33, 95, 41, 31]),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_match_torch(
    num_elements: int,
    counts: list[int],
    has_bias: bool,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (("Q4_K", 33), ("Q6_K", 136), ("Q4_0", 31))
    matrices = [random_matrix(FORMATS[name], size, 520) for name, size in sizes]
    layer = layer_of(matrices, kernel_device)
    x = torch.randn(MANY_ROWS, 520, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(200, generator=torch.Generator().manual_seed(1)) if has_bias else None
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(kernel_device), requires_grad=False)
    scratch = torch.empty(num_elements, device=kernel_device)
    product, decodes = product_and_decodes(layer, x.to(kernel_device), scratch, monkeypatch)
    assert decodes == counts
    expected = x.double() @ torch.cat([decode(matrix) for matrix in matrices]).double().t()
    assert error(product.cpu(), expected if bias is None else expected + bias) < 1e-5


def test_rows_in_another_order_and_strided_ones(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(FORMATS["desc_act"], 40, 256)
    x = torch.randn(MANY_ROWS, 300, generator=torch.Generator().manual_seed(0))
    scratch = torch.empty(40 * 256, device=kernel_device)
    layer = layer_of([matrix], kernel_device)
    product, decodes = product_and_decodes(layer, x.to(kernel_device)[:, :256], scratch, monkeypatch)
    assert decodes == [40]
    assert error(product.cpu(), x[:, :256].double() @ decode(matrix).double().t()) < 1e-5


@pytest.mark.parametrize(("name", "most"), [("Q4_K", 64), ("NVFP4", 64), ("GPTQ", 128), ("Q8_0", 64), ("FP8", 128)])
def test_parts_of_few_inputs_are_decoded_into_memory_for_fewer_rows(
    name: str, most: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of([random_matrix(FORMATS[name], 16, 64)], kernel_device)
    scratch = torch.empty(16 * 64, device=kernel_device)
    for num_rows, counts in ((most, []), (most + 1, [16])):
        rows = torch.zeros(num_rows, 64, device=kernel_device)
        assert product_and_decodes(layer, rows, scratch, monkeypatch)[1] == counts


@pytest.mark.parametrize("why", ["few rows", "batch invariant", "another dtype"])
def test_weights_are_decoded_in_registers_otherwise(
    why: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = random_matrix(FORMATS["Q4_0"], 40, 64)
    layer = layer_of([matrix], kernel_device, invariant=why == "batch invariant")
    x = torch.randn(20 if why == "few rows" else MANY_ROWS, 64, generator=torch.Generator().manual_seed(0))
    dtype = torch.float16 if why == "another dtype" else torch.float32
    scratch = torch.empty(40 * 64, dtype=dtype, device=kernel_device)
    product, decodes = product_and_decodes(layer, x.to(kernel_device), scratch, monkeypatch)
    assert not decodes
    assert error(product.cpu(), x.double() @ decode(matrix).double().t()) < 1e-5


def test_the_scratch_has_the_largest_layer_or_some_outputs_of_it() -> None:
    from kernels.linear.coded_decode import scratch_of

    def size(*shapes: tuple[int, int]) -> int:
        return len(scratch_of(shapes, torch.bfloat16, torch.device("meta")))

    assert size((40, 64), (30, 96)) == 2880
    assert size((2**16, 2**12)) == 2**26  # 128 MiB
    assert size((2**16, 2**20)) == 128 * 2**20  # at least 128 outputs
    assert size() == 0

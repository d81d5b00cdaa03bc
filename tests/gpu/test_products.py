"""Products that only a GPU computes so: FP8 on tensor cores, codes in PTX, every tile; and keys chosen in chunks.

Triton's interpreter knows no PTX, rounds to bfloat16 towards zero, and multiplies FP8 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.inputs.coded_layers import FORMATS as PUBLISHED
from kernels.attention.indexer import topk_slots, topk_slots_torch
from kernels.attention.indexer_inputs import IndexerInputs
from kernels.attention_metadata import AttentionMetadata
from kernels.coded_weight import CodedMatrix, CodedWeight, CodeFormat, decode
from kernels.linear import coded_triton, fp8_triton
from kernels.linear.coded_decode import scratch_of
from kernels.linear.coded_triton import CodedTritonLinear
from kernels.linear.fp8 import fp8_linear
from kernels.linear.fp8_triton import Fp8Linear
from tests.kernels.coded_matrices import FORMATS, random_matrix

DEVICE = torch.device("cuda")
ROWS = (1, 16, 17, 64, 65, 128, 129, 256, 301)
SHAPES = ((512, 1024), (4096, 2048), (200, 336))  # outputs and inputs; cuBLAS knows the scales of the first two
ROUNDED = 8e-3  # of the norm of a product, whose sums are rounded to bfloat16
GROUPS = CodeFormat(bits=8, granules_per_outer=4, outer_type="float32", floats="e4m3", activations="groups")
TOKENS = replace(GROUPS, granules_per_outer=2**19, activations="tokens")
CODES = {**FORMATS, **{name: PUBLISHED[name] for name in ("int4, groups of 128", "MXFP4", "NVFP4")}}
SCHEMES = {"groups": (GROUPS, None), "tokens": (TOKENS, None), "one scale": (TOKENS, 0.02)}


def fp8_matrix(form: CodeFormat, num_outputs: int, num_inputs: int, scale: float | None) -> CodedMatrix:
    """Return random weights with scales for blocks of 128 outputs, and perhaps one for all activations."""
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    codes = torch.randn(num_outputs, num_inputs, generator=generator).mul(60).to(torch.float8_e4m3fn)
    blocks = 1e-4 * (0.5 + torch.rand(-(-num_outputs // 128), form.num_outers(num_inputs), generator=generator))
    return CodedMatrix(
        format=form,
        codes=codes.view(torch.uint8),
        outer_scales=blocks.repeat_interleave(128, dim=0)[:num_outputs].contiguous(),
        activation_scales=None if scale is None else torch.full((num_outputs,), scale),
    )


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.double().cpu() - expected.double()).norm() / expected.double().norm())


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no tensor cores for FP8")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_matches_the_reference(scheme: str, shape: tuple[int, int]) -> None:
    form, scale = SCHEMES[scheme]
    matrix = fp8_matrix(form, *shape, scale)
    rows = torch.randn(max(ROWS), shape[1]) * torch.rand(max(ROWS), 1)
    for dtype in (torch.bfloat16, torch.float16):
        x = rows.to(dtype)
        expected = fp8_linear(x, matrix)
        for batch_invariant in (False, True):
            layer = Fp8Linear(CodedWeight((matrix,)), shape[0], DEVICE, batch_invariant=batch_invariant)
            together = layer(x.to(DEVICE))
            for num_rows in ROWS:
                output = layer(x[:num_rows].to(DEVICE))
                assert error(output, expected[:num_rows]) < ROUNDED, (dtype, batch_invariant, num_rows)
                assert not batch_invariant or torch.equal(output, together[:num_rows])


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cuBLAS is taken on Hopper only")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cublas_multiplies_as_triton_does(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, scale = SCHEMES[scheme]
    layer = Fp8Linear(CodedWeight((fp8_matrix(form, 512, 1024, scale),)), 512, DEVICE)
    assert layer.cublas_scales is not None
    x = torch.randn(303, 1024, device=DEVICE, dtype=torch.bfloat16)
    by_cublas = layer(x)
    monkeypatch.setattr(fp8_triton, "_ROWS_OF_TILES", 2**30)
    assert error(by_cublas, layer(x).cpu()) < ROUNDED


@pytest.mark.parametrize("name", CODES)
def test_every_tile_of_codes_matches_decoded_weights(name: str) -> None:
    matrix = random_matrix(CODES[name], 384, 1280)
    weight = decode(matrix)
    for dtype, most in ((torch.bfloat16, ROUNDED), (torch.float16, 2e-3)):
        layer = CodedTritonLinear(CodedWeight((matrix,)), 384, DEVICE)
        x = torch.randn(max(ROWS), 1280).to(dtype)
        expected = x.double() @ weight.double().t()
        layer.scratch = scratch_of([(384, 1280)], dtype, DEVICE)
        outputs = [layer(x[:num_rows].to(DEVICE)) for num_rows in ROWS]
        for num_rows, output in zip(ROWS, outputs, strict=True):
            assert error(output, expected[:num_rows]) < most, (dtype, num_rows)


@pytest.mark.parametrize("tile", [coded_triton._MANY_ROWS, coded_triton._SOME_ROWS, coded_triton._ANY_ROWS], ids=str)
@pytest.mark.parametrize("name", ["GPTQ", "FP8", "Q4_K", "MXFP4", "Q8_0", "int4, groups of 128"])
def test_a_tile_computes_any_format(name: str, tile: coded_triton._Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_triton, "_tiles", lambda section, dtype: [(2**30, tile)])
    matrix = random_matrix(CODES[name], 200, 1000)
    layer = CodedTritonLinear(CodedWeight((matrix,)), 200, DEVICE)
    x = torch.randn(150, 1000).to(torch.bfloat16)
    assert error(layer(x.to(DEVICE)), x.double() @ decode(matrix).double().t()) < ROUNDED


@pytest.mark.parametrize("lengths", [[32768], [5000, 9000, 100, 1], [4097] * 3], ids=str)
def test_several_programs_choose_the_keys_of_a_query(lengths: list[int]) -> None:
    block_size, top_k = 64, 2048
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    for index, blocks in enumerate(order.split(counts)):
        tables[index, : len(blocks)] = blocks
    keys = torch.randint(-2, 3, (sum(counts), block_size, 32)).float()  # so that many scores are equal
    query = torch.randint(-2, 3, (len(lengths), 8, 32)).float()
    weights = torch.randint(-2, 3, (len(lengths), 8)).float()

    def chosen(device: str, choose: Callable[[IndexerInputs], torch.Tensor]) -> torch.Tensor:
        metadata = AttentionMetadata(
            slot_mapping=torch.zeros(len(lengths), dtype=torch.int64, device=device),
            cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            num_decodes=len(lengths),
            max_query_len=1,
            max_seq_len=max(lengths),
        )
        own = query.to(device), weights.to(device), keys.to(device)
        return choose(IndexerInputs(*own, metadata, 1.0, top_k)).cpu()

    assert torch.equal(chosen("cuda", topk_slots), chosen("cpu", topk_slots_torch))

"""A linear layer of FP8 weights and activations on a GPU (W8A8): tensor cores multiply the codes of both.

That takes half the time of products in bfloat16, and no instructions to decode weights. One kernel quantises the
activations, another multiplies; for many rows cuBLAS does, where it knows the scales. The reference is fp8.py.

As in coded_triton.py a tile of weights is the first operand of a product with few rows, which so waste little of it,
and their sums are divided into parts. Tensor cores of Hopper keep fewer bits of a sum than float32 has, so the products
of each 128 inputs are added to a sum in float32.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

from kernels.cache.fp8 import FP8
from kernels.cache.triton.fp8 import encode_fp8
from kernels.coded_weight import CodedWeight
from kernels.dequant.stored import unpacked
from kernels.linear.coded_triton import add_parts
from kernels.linear.fp8 import GROUP, LEAST, group_of

__all__ = ["Fp8Linear", "can_multiply_fp8", "fp8_linear_kernel", "quantize_groups_kernel", "quantize_rows_kernel"]

_LEAST_CAPABILITY = (8, 9)  # whose tensor cores multiply FP8
_HOPPER = (9, 0)
_ALIGNED_INPUTS = 16  # bytes that are loaded at once; one at a time they would spill registers
_LEAST = tl.constexpr(LEAST)
_LARGEST = tl.constexpr(448.0)
_GROUP = tl.constexpr(GROUP)
_BLOCK = 2048  # activations that a program quantises at once
_MOST_PARTS = 8  # of a sum
_CUBLAS_INPUTS = 4 * GROUP  # cuBLAS wants scales of a multiple of four groups
_CUBLAS_CUDA = (12, 9)  # the first version whose cuBLAS knows scales of blocks


@dataclass(frozen=True)
class _Tile:
    """How many rows and outputs a program computes, how it is compiled, and in how many programs sums are divided."""

    num_rows: int
    num_outputs: int
    num_warps: int
    num_stages: int
    num_programs: int = 0  # which keep a GPU busy; 0: sums are not divided

    @property
    def rows_first(self) -> bool:
        """Whether rows are the first operand: tensor cores take 64 of these, and a thread has scales of two of them."""
        return self.num_rows >= 64


# The first that has room for all rows is taken, or the last. They fit into the 99 KB of GPUs for consumers.
_TILES = (_Tile(16, 64, 4, 5, 256), _Tile(64, 64, 4, 4, 256), _Tile(128, 64, 8, 4))
_INVARIANT_TILE = _Tile(64, 128, 8, 4)  # for any number of rows, where a row is to have the same bits in any batch
_ROWS_OF_TILES = 64  # for more rows cuBLAS multiplies


def can_multiply_fp8(weight: CodedWeight, device: torch.device) -> bool:
    """Whether an ``Fp8Linear`` computes a weight on a device; on a CPU, where Triton is interpreted, it may."""
    if [matrix.format.activations is not None for matrix in weight.sections] != [True]:
        return False
    if weight.sections[0].shape[1] % _ALIGNED_INPUTS:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


# The number of rows changes from step to step, which must not wait for a compilation.
@triton.jit(do_not_specialize=["scale_stride"])
def quantize_groups_kernel(
    codes,  # uint8 [num_rows, num_inputs], contiguous
    scales,  # float32 [num_groups, scale_stride]
    rows,  # [num_rows, num_inputs]
    num_inputs,
    row_stride,
    scale_stride,
    BLOCK: tl.constexpr,
):
    """Quantise BLOCK activations of one row, each 128 with a scale of their own."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(rows + row * row_stride + column, mask=column < num_inputs, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST)
    octets = encode_fp8(x, tl.div_rn(_LARGEST, largest)[:, None])
    tl.store(codes + row * num_inputs + column, octets, mask=column < num_inputs)
    scale_at = scales + group.to(tl.int64) * scale_stride + row
    tl.store(scale_at, tl.div_rn(largest, _LARGEST), mask=group * _GROUP < num_inputs)


@triton.jit
def quantize_rows_kernel(
    codes,  # uint8 [num_rows, num_inputs], contiguous
    scales,  # float32 [num_rows]
    rows,  # [num_rows, num_inputs]
    scale,  # float32 [1], of all rows, or None: that of a row follows from its largest activation
    num_inputs,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Quantise a row of activations, which have one scale."""
    row = tl.program_id(0).to(tl.int64)
    own_rows, own_codes, inputs = rows + row * row_stride, codes + row * num_inputs, tl.arange(0, BLOCK)
    if scale is not None:
        factor = tl.load(scale)
        inverse = tl.div_rn(1.0, factor)
    else:
        largest = tl.full((BLOCK,), _LEAST, tl.float32)
        for start in range(0, num_inputs, BLOCK):
            x = tl.load(own_rows + start + inputs, mask=inputs < num_inputs - start, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        of_row = tl.max(largest, axis=0)
        factor, inverse = tl.div_rn(of_row, _LARGEST), tl.div_rn(_LARGEST, of_row)
    tl.store(scales + row, factor)
    for start in range(0, num_inputs, BLOCK):
        mask = inputs < num_inputs - start
        x = tl.load(own_rows + start + inputs, mask=mask, other=0.0).to(tl.float32)
        tl.store(own_codes + start + inputs, encode_fp8(x, inverse), mask=mask)


@triton.jit
def _across(of_rows, of_outputs, ROWS_FIRST: tl.constexpr):
    """Return what each row and each output have as they lie in a tile."""
    if ROWS_FIRST:
        return of_rows[:, None], of_outputs[None, :]
    else:  # noqa: RET505 - a branch at compile time
        return of_rows[None, :], of_outputs[:, None]


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def fp8_linear_kernel(
    output,  # [num_rows, num_outputs], or of parts float32 [PARTS, num_rows, num_outputs], contiguous
    rows,  # float8 [num_rows, num_inputs], contiguous
    row_scales,  # float32 [num_groups, scale_stride]; one group without HAS_GROUPS
    weight,  # float8 [num_outputs, num_inputs], contiguous
    weight_scales,  # [num_groups, num_outputs]
    bias,  # [num_outputs], or None
    num_rows,
    num_outputs,
    num_inputs,
    blocks_per_part,  # of the sums
    scale_stride,
    HAS_GROUPS: tl.constexpr,  # of 128 inputs
    HAS_BLOCKS: tl.constexpr,  # the outputs of a program have the same scales
    ROWS_FIRST: tl.constexpr,  # a tile is [rows, outputs], not [outputs, rows]
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """One program computes a tile of outputs, or a part of its sums. Neighbours share weights, which L2 then has."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    first_output = tl.program_id(0) // num_row_tiles * BLOCK_OUTPUTS
    row = tl.program_id(0) % num_row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = first_output + tl.arange(0, BLOCK_OUTPUTS)
    has_row, has_column = row < num_rows, column < num_outputs
    start = tl.program_id(1) * blocks_per_part
    stop = tl.minimum(start + blocks_per_part, tl.cdiv(num_inputs, _GROUP))
    inputs = tl.arange(0, _GROUP)
    x_tile = rows + row[:, None].to(tl.int64) * num_inputs + (start * _GROUP + inputs)[None, :]
    w_tile = weight + column[:, None].to(tl.int64) * num_inputs + (start * _GROUP + inputs)[None, :]
    scaled = first_output + tl.arange(0, 1 if HAS_BLOCKS else BLOCK_OUTPUTS)
    x_scales, w_scales = _across(row_scales + row, weight_scales + scaled, ROWS_FIRST)
    has_x_scale, has_w_scale = _across(has_row, scaled < num_outputs, ROWS_FIRST)
    x_scale = tl.load(x_scales + start * scale_stride, mask=has_x_scale & HAS_GROUPS, other=1.0)
    w_scale = tl.load(w_scales + start * num_outputs, mask=has_w_scale & HAS_GROUPS, other=1.0)
    if ROWS_FIRST:
        sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    else:
        sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    for block in range(start, stop):
        is_input = (inputs < num_inputs - block * _GROUP)[None, :]
        x = tl.load(x_tile, mask=has_row[:, None] & is_input, other=0.0)
        w = tl.load(w_tile, mask=has_column[:, None] & is_input, other=0.0)
        if ROWS_FIRST:  # noqa: SIM108 - a branch at compile time
            products = tl.dot(x, tl.trans(w))
        else:
            products = tl.dot(w, tl.trans(x))
        if HAS_GROUPS:
            # Loaded one block ahead, as the compiler does with what is multiplied; after the last one in vain.
            following = tl.minimum(block + 1, stop - 1)
            next_x_scale = tl.load(x_scales + following * scale_stride, mask=has_x_scale, other=0.0)
            next_w_scale = tl.load(w_scales + following * num_outputs, mask=has_w_scale, other=0.0)
            products *= x_scale * w_scale.to(tl.float32)
            x_scale, w_scale = next_x_scale, next_w_scale
        sums += products
        x_tile += _GROUP
        w_tile += _GROUP
    row_at, column_at = _across(row, column, ROWS_FIRST)
    mask = (row_at < num_rows) & (column_at < num_outputs)
    if not HAS_GROUPS:
        sums *= tl.load(row_scales + row_at, mask=row_at < num_rows, other=0.0)
        sums *= tl.load(weight_scales + column_at, mask=column_at < num_outputs, other=0.0).to(tl.float32)
    if bias is not None:
        sums += tl.load(bias + column_at, mask=column_at < num_outputs, other=0.0).to(tl.float32)
    target = output + (tl.program_id(1) * num_rows + row_at).to(tl.int64) * num_outputs + column_at
    tl.store(target, sums.to(output.dtype.element_ty), mask=mask)


class Fp8Linear(nn.Module):
    """A linear layer on FP8 weights whose activations are quantised to FP8 too.

    Args:
        weight: of one section, in E4M3, whose format says how activations are quantised; on any device.
        out_features: outputs; those that the weight lacks are zero.
        device: of the weights.
        batch_invariant: give a row the same bits in any batch, of any size.

    Attributes:
        bias: a parameter [out_features] on the device, or None, as at first.
        weight: float8 [out_features, in_features].
        scales: of the weights, [num_groups, out_features]; one group without groups of inputs.
        activation_scale: float32 [1], or None: scales follow from the activations.
        cublas_scales: of the weights as cuBLAS wants them, or None: it knows no such scales, or no such device.
    """

    bias: torch.Tensor | None
    weight: torch.Tensor
    scales: torch.Tensor
    activation_scale: torch.Tensor | None
    cublas_scales: torch.Tensor | None

    def __init__(
        self, weight: CodedWeight, out_features: int, device: torch.device, *, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        (matrix,) = weight.sections
        matrix = unpacked(matrix.with_parts({name: part.to(device) for name, part in matrix.parts.items()}))
        self.out_features, self.in_features = out_features, matrix.shape[1]
        self.batch_invariant, self.group = batch_invariant, group_of(matrix)
        missing = out_features - matrix.shape[0]
        scales = F.pad(matrix.outer_scales, (0, 0, 0, missing)).t().contiguous()
        own = matrix.activation_scales
        self.register_parameter("bias", None)
        self._set("weight", F.pad(matrix.codes, (0, 0, 0, missing)).view(FP8))
        self._set("scales", scales)
        self._set("activation_scale", None if own is None else own.max().view(1))
        self._set("cublas_scales", self._cublas_scales() if _has_scaled_mm(device) else None)
        in_blocks = scales[:, : out_features // GROUP * GROUP].reshape(len(scales), -1, GROUP)
        self.has_blocks = out_features % GROUP == 0 and bool((in_blocks == in_blocks[:, :, :1]).all())

    def _set(self, name: str, value: torch.Tensor | None) -> None:
        self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    def _cublas_scales(self) -> torch.Tensor | None:
        """Return the scales of `torch._scaled_mm`: of outputs, or of blocks of 128 x 128 with as many inputs."""
        if self.out_features % 16 or self.in_features % 16:
            return None
        if self.group is None:
            return self.scales.float().contiguous()
        if self.out_features % GROUP or self.in_features % _CUBLAS_INPUTS:
            return None
        return self.scales[:, ::GROUP].float().t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features], in the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        is_cublas = len(rows) > _ROWS_OF_TILES and not self.batch_invariant and rows.dtype == torch.bfloat16
        if not len(rows):
            output = rows.new_empty(0, self.out_features)
        elif is_cublas and self.cublas_scales is not None:
            output = self._multiply_by_cublas(rows, self.cublas_scales)
        else:
            output = self._multiply(rows)
        return output.view(*x.shape[:-1], self.out_features)

    def quantize(self, rows: torch.Tensor, num_padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of rows, float8 [num_padded, in_features], and their scales, [num_groups, num_padded].

        Those of rows after the last may be anything.
        """
        num_inputs = self.in_features
        codes = torch.empty(num_padded, num_inputs, dtype=torch.uint8, device=rows.device)
        num_groups = len(self.scales) if self.group else 1
        scales = torch.empty(num_groups, num_padded, dtype=torch.float32, device=rows.device)
        constants = {"BLOCK": _BLOCK, "num_warps": 4, "enable_fp_fusion": False}
        if self.group:
            grid = len(rows), triton.cdiv(num_inputs, _BLOCK)
            quantize_groups_kernel[grid](codes, scales, rows, num_inputs, rows.stride(0), num_padded, **constants)
        else:
            own = self.activation_scale
            quantize_rows_kernel[(len(rows),)](codes, scales, rows, own, num_inputs, rows.stride(0), **constants)
        return codes.view(FP8), scales

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows, tile = len(rows), self._tile(len(rows))
        output = rows.new_empty(num_rows, self.out_features)
        codes, scales = self.quantize(rows, num_rows)
        blocks_per_part = self._blocks_per_part(tile)
        num_parts = triton.cdiv(triton.cdiv(self.in_features, GROUP), blocks_per_part)
        target = output
        if num_parts > 1:
            target = rows.new_empty(num_parts, num_rows, self.out_features, dtype=torch.float32)
        num_tiles = triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(self.out_features, tile.num_outputs)
        fp8_linear_kernel[num_tiles, num_parts](
            target,
            codes,
            scales,
            self.weight,
            self.scales,
            self.bias if num_parts == 1 else None,
            num_rows,
            self.out_features,
            self.in_features,
            blocks_per_part,
            num_rows,
            HAS_GROUPS=self.group is not None,
            HAS_BLOCKS=self.has_blocks,
            ROWS_FIRST=tile.rows_first,
            BLOCK_ROWS=tile.num_rows,
            BLOCK_OUTPUTS=tile.num_outputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
        if num_parts > 1:
            add_parts(output, target, self.bias)
        return output

    def _tile(self, num_rows: int) -> _Tile:
        if self.batch_invariant:
            return _INVARIANT_TILE
        return next((tile for tile in _TILES if num_rows <= tile.num_rows), _TILES[-1])

    def _blocks_per_part(self, tile: _Tile) -> int:
        """Return of how many blocks a program adds up the inputs. Of the rows, it depends only on their tile."""
        num_blocks: int = triton.cdiv(self.in_features, GROUP)
        if not tile.num_programs:
            return num_blocks
        num_tiles: int = triton.cdiv(self.out_features, tile.num_outputs)
        most = min(_MOST_PARTS, max(1, num_blocks // 2))
        return -(-num_blocks // min(most, -(-tile.num_programs // num_tiles)))

    def _multiply_by_cublas(self, rows: torch.Tensor, weight_scales: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows)
        codes, scales = self.quantize(rows, triton.cdiv(num_rows, 4) * 4)  # scales begin at multiples of 16 bytes
        output = torch._scaled_mm(codes, self.weight.t(), scales.t(), weight_scales, out_dtype=torch.bfloat16)[
            :num_rows
        ]
        return output if self.bias is None else output + self.bias

    def compile_kernels(self, dtype: torch.dtype) -> None:
        """Launch what any number of rows of ``dtype`` launches."""
        for num_rows in (1, *(tile.num_rows + 1 for tile in _TILES)):
            self(torch.zeros(num_rows, self.in_features, dtype=dtype, device=self.weight.device))


def _has_scaled_mm(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` has been seen to multiply with these scales on such a device."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != _HOPPER:
        return False
    return tuple(map(int, torch.version.cuda.split("."))) >= _CUBLAS_CUDA

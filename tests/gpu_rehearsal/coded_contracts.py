"""The contracts of the kernels on codes: what a launch must pass, and what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from kernels.linear.fp8 import GROUP, quantize
from tests.gpu_rehearsal.expert_contracts import grouped_product
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor
from tests.gpu_rehearsal.layer_contracts import require_rows

__all__ = ["CONTRACTS"]


def _require_codes(call: Any, num_blocks: int, *stacked: int) -> None:
    """Require codes of ``num_outputs`` outputs and the factors of their parts; ``stacked`` is (num_experts,) or ()."""
    num_outputs, num_parts = call.codes.shape[-2], num_blocks * call.PER_WORD
    require_tensor(
        "codes", call.codes, torch.uint8 if stacked else call.codes.dtype, *stacked, num_blocks, num_outputs, call.WIDTH
    )
    num_outers = -(-num_parts // call.PARTS_PER_OUTER)
    for name, count in (("outer_scales", num_outers), ("outer_minima", num_outers), ("zero_points", num_outers),
                        ("inner_scales", num_parts), ("inner_minima", num_parts)):  # fmt: skip
        if (factors := getattr(call, name)) is not None:
            require_tensor(name, factors, factors.dtype, *stacked, count, num_outputs)
            require(factors.is_contiguous(), f"{name} is not contiguous")
    if call.output_scales is not None:
        require_tensor("output_scales", call.output_scales, torch.float32, *stacked, num_outputs)
        require(call.output_scales.is_contiguous(), "output_scales is not contiguous")
    require(call.codes.is_contiguous(), "codes is not contiguous")


def _decoded(call: Any, expert: int | None = None) -> torch.Tensor:
    """Return the weights of packed codes, of one expert if they are stacked, float32 [num_outputs, num_inputs]."""

    def own(name: str) -> Any:
        tensor = getattr(call, name)
        return tensor if tensor is None else plain(tensor) if expert is None else plain(tensor)[expert]

    codes, bits = own("codes").int(), 8 * call.codes.dtype.itemsize // call.PER_WORD
    parts = torch.stack([codes >> bits * part & (1 << bits) - 1 for part in range(call.PER_WORD)], dim=1)
    parts = parts.flatten(0, 1)  # [num_parts, num_outputs, width]
    levels = parts.float()
    if call.LOW_LEVELS is not None:
        octets = b"".join(half.to_bytes(8, "little", signed=True) for half in (call.LOW_LEVELS, call.HIGH_LEVELS))
        levels = torch.tensor(list(octets), dtype=torch.float32)[parts.long()]
    if call.FLOATS is not None:
        levels = parts.byte().view(torch.float8_e4m3fn if call.FLOATS == "e4m3" else torch.float8_e5m2).float()

    def factor(outer: str, inner: str | None = None) -> torch.Tensor:
        values = own(outer).float()[torch.arange(len(parts)) // call.PARTS_PER_OUTER]
        inner_values = None if inner is None else own(inner)
        return (values if inner_values is None else values * inner_values).unsqueeze(2)

    levels -= call.ZERO if call.outer_minima is None and call.zero_points is None else 0
    levels -= 0 if call.zero_points is None else factor("zero_points")
    weight = levels * factor("outer_scales", "inner_scales")
    if call.outer_minima is not None:
        weight -= factor("outer_minima", "inner_minima")
    if call.output_scales is not None:
        weight *= own("output_scales").unsqueeze(1)
    return weight.transpose(0, 1).flatten(1)[:, : call.num_inputs]


def coded_linear(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.coded_triton.coded_linear_kernel."""
    num_rows, num_outputs = call.output.shape[-2:]
    width, per_word, num_parts = call.WIDTH, call.PER_WORD, grid[1]
    require_rows("rows", call.rows, call.row_stride, call.rows.dtype, num_rows, call.num_inputs)
    require((call.num_rows, call.num_outputs) == (num_rows, num_outputs), "sizes do not match the output")
    require(call.num_blocks * per_word * width >= call.num_inputs, "the blocks lack inputs")
    _require_codes(call, call.num_blocks)
    require(call.output.stride()[-2:] == (call.output_stride, 1), "not the strides of the output")
    tiles = -(-num_rows // call.BLOCK_ROWS) * -(-num_outputs // call.BLOCK_OUTPUTS)
    require(grid[0] == tiles, f"the grid {grid} is not one program for each of {tiles} tiles")
    require((num_parts - 1) * call.blocks_per_part < call.num_blocks <= num_parts * call.blocks_per_part, "parts")
    is_divided = call.output.dim() == 3
    require(is_divided or num_parts == 1, f"{num_parts} programs write the same outputs")
    if is_divided:
        require_tensor("output", call.output, torch.float32, num_parts, num_rows, num_outputs)
        require(call.output.is_contiguous() and call.bias is None, "parts are not contiguous, or have a bias")
    if call.bias is not None:
        require_tensor("bias", call.bias, call.rows.dtype, num_outputs)

    def compute() -> None:
        rows, weight = plain(call.rows), _decoded(call).to(call.rows.dtype)
        if not is_divided:
            plain(call.output).copy_(F.linear(rows, weight, None if call.bias is None else plain(call.bias)))
            return
        size = call.blocks_per_part * per_word * width
        for part in range(num_parts):
            own = slice(part * size, (part + 1) * size)
            plain(call.output)[part] = rows[:, own].float() @ weight[:, own].float().t()

    return compute


def add_parts(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.coded_triton.add_parts_kernel."""
    num_rows, num_outputs = call.output.shape
    require_tensor("parts", call.parts, torch.float32, call.num_parts, num_rows, num_outputs)
    require(call.parts.is_contiguous(), "parts is not contiguous")
    require((call.num_rows, call.num_outputs) == (num_rows, num_outputs), "sizes do not match the output")
    require(call.output.stride() == (call.output_stride, 1), "not the strides of the output")
    require(tuple(grid) == (num_rows, -(-num_outputs // call.BLOCK)), f"the grid {grid} does not cover the output")
    if call.bias is not None:
        require_tensor("bias", call.bias, call.output.dtype, num_outputs)

    def compute() -> None:
        total = plain(call.parts).sum(dim=0) + (0 if call.bias is None else plain(call.bias).float())
        plain(call.output).copy_(total)

    return compute


def decode(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.coded_decode.decode_kernel."""
    num_decoded, num_inputs = call.weight.shape
    require((call.num_decoded, call.num_inputs) == (num_decoded, num_inputs), "sizes do not match the weight")
    require(call.weight.is_contiguous(), "weight is not contiguous")
    num_blocks = -(-num_inputs // (call.WIDTH * call.PER_WORD))
    _require_codes(call, num_blocks)
    require(call.num_outputs == call.codes.shape[-2], "not the number of outputs")
    wanted = (num_blocks, -(-num_decoded // call.BLOCK_OUTPUTS))
    require(tuple(grid) == wanted, f"the grid {grid} is not one program for each of {wanted} blocks")
    if call.indices is not None:
        require_tensor("indices", call.indices, torch.int64, num_decoded)
        require(call.indices.is_contiguous(), "indices is not contiguous")
        return lambda: plain(call.weight).copy_(_decoded(call)[plain(call.indices)])
    require(0 <= call.first_output <= call.num_outputs - num_decoded, f"there is no output {call.first_output}")
    own = slice(call.first_output, call.first_output + num_decoded)
    return lambda: plain(call.weight).copy_(_decoded(call)[own])


def _require_activations(call: Any, num_programs: int) -> tuple[int, int]:
    """Check what both kernels that quantise activations take; return rows and inputs."""
    num_rows, num_inputs = call.rows.shape
    require_rows("rows", call.rows, call.row_stride, call.rows.dtype, num_rows, call.num_inputs)
    require(call.codes.dtype == torch.uint8 and call.codes.is_contiguous(), "codes are not contiguous bytes")
    require(call.codes.shape[1] == num_inputs and len(call.codes) >= num_rows, "codes have other sizes than rows")
    require(num_programs == num_rows, f"{num_programs} programs quantise {num_rows} rows")
    return num_rows, num_inputs


def quantize_groups(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.fp8_triton.quantize_groups_kernel."""
    num_rows, num_inputs = _require_activations(call, grid[0])
    require_tensor("scales", call.scales, torch.float32, -(-num_inputs // GROUP), call.scale_stride)
    require(call.scale_stride >= num_rows and call.scales.is_contiguous(), "scales have no room for all rows")
    require(grid[1] == -(-num_inputs // call.BLOCK), f"the grid {grid} does not cover the inputs")

    def compute() -> None:
        codes, scales = quantize(plain(call.rows), GROUP)
        plain(call.codes)[:num_rows], plain(call.scales)[:, :num_rows] = codes.view(torch.uint8), scales

    return compute


def quantize_rows(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.fp8_triton.quantize_rows_kernel."""
    num_rows, _ = _require_activations(call, grid[0])
    require(call.scales.dtype == torch.float32 and call.scales.shape[1] >= num_rows, "scales lack rows")
    if call.scale is not None:
        require_tensor("scale", call.scale, torch.float32, 1)

    def compute() -> None:
        codes, scales = quantize(plain(call.rows), None, None if call.scale is None else plain(call.scale))
        plain(call.codes)[:num_rows], plain(call.scales)[:, :num_rows] = codes.view(torch.uint8), scales

    return compute


def fp8_linear(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.linear.fp8_triton.fp8_linear_kernel."""
    num_rows, num_outputs = call.output.shape[-2:]
    num_blocks, num_parts = -(-call.num_inputs // GROUP), grid[1]
    for name, count in (("rows", num_rows), ("weight", num_outputs)):
        require_tensor(name, getattr(call, name), torch.float8_e4m3fn, count, call.num_inputs)
    num_scales = num_blocks if call.HAS_GROUPS else 1
    require_tensor("row_scales", call.row_scales, torch.float32, num_scales, call.scale_stride)
    require_tensor("weight_scales", call.weight_scales, call.weight_scales.dtype, num_scales, num_outputs)
    for name in ("output", "rows", "weight", "row_scales", "weight_scales"):
        require(getattr(call, name).is_contiguous(), f"{name} is not contiguous")
    require((call.num_rows, call.num_outputs) == (num_rows, num_outputs), "sizes do not match the output")
    tiles = -(-num_rows // call.BLOCK_ROWS) * -(-num_outputs // call.BLOCK_OUTPUTS)
    require(grid[0] == tiles, f"the grid {grid} is not one program for each of {tiles} tiles")
    require((num_parts - 1) * call.blocks_per_part < num_blocks <= num_parts * call.blocks_per_part, "parts")
    is_divided = call.output.dim() == 3
    require(is_divided or num_parts == 1, f"{num_parts} programs write the same outputs")
    require(not is_divided or (call.output.dtype == torch.float32 and call.bias is None), "parts have a bias")

    def compute() -> None:
        group = GROUP if call.HAS_GROUPS else call.num_inputs

        def scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            spread = plain(scales)[:, : len(codes)].float().t().repeat_interleave(group, 1)
            return plain(codes).float() * spread[:, : call.num_inputs]

        x, weight = scaled(call.rows, call.row_scales), scaled(call.weight, call.weight_scales)
        if not is_divided:
            bias = None if call.bias is None else plain(call.bias).float()
            plain(call.output).copy_(F.linear(x, weight, bias))
            return
        size = call.blocks_per_part * GROUP
        for part in range(num_parts):
            own = slice(part * size, (part + 1) * size)
            plain(call.output)[part] = x[:, own] @ weight[:, own].t()

    return compute


def grouped_coded_linear(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.experts.triton.coded_experts.grouped_coded_linear_kernel."""
    num_experts, num_blocks, num_outputs, _ = call.codes.shape
    _require_codes(call, num_blocks, num_experts)
    require(call.num_blocks == num_blocks, f"{call.num_blocks} is not the number of blocks, {num_blocks}")
    require(call.num_blocks * call.PER_WORD * call.WIDTH >= call.num_inputs, "the blocks lack inputs")
    require(call.num_outers == call.outer_scales.shape[1], f"{call.num_outers} is not the number of outer factors")
    require(num_outputs == call.num_outputs * (2 if call.GATED else 1), f"codes have {num_outputs} outputs")
    tile_outputs = call.BLOCK_OUTPUTS // 2 if call.GATED else call.BLOCK_OUTPUTS  # the rest is the gate's or up's
    dtype = call.rows.dtype
    return grouped_product(call, grid, num_experts, tile_outputs, lambda expert: _decoded(call, expert).to(dtype))


CONTRACTS: dict[str, Contract] = {
    "coded_linear_kernel": coded_linear,
    "add_parts_kernel": add_parts,
    "decode_kernel": decode,
    "grouped_coded_linear_kernel": grouped_coded_linear,
    "quantize_groups_kernel": quantize_groups,
    "quantize_rows_kernel": quantize_rows,
    "fp8_linear_kernel": fp8_linear,
}

"""The contracts of the kernels on codes: what a launch must pass, and what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.gpu_rehearsal.expert_contracts import grouped_product
from tests.gpu_rehearsal.kernel_contracts import Compute, Contract, plain, require, require_tensor
from tests.gpu_rehearsal.layer_contracts import require_rows

__all__ = ["CONTRACTS"]


def _require_codes(call: Any, num_blocks: int, *stacked: int) -> None:
    """Require codes of ``num_outputs`` outputs and the factors of their parts; ``stacked`` is (num_experts,) or ()."""
    num_outputs, num_parts = call.codes.shape[-2], num_blocks * call.PER_BYTE
    require_tensor("codes", call.codes, torch.uint8, *stacked, num_blocks, num_outputs, call.WIDTH)
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

    codes, bits = own("codes"), 8 // call.PER_BYTE
    parts = torch.stack([codes >> bits * part & (1 << bits) - 1 for part in range(call.PER_BYTE)], dim=1)
    parts = parts.flatten(0, 1)  # [num_parts, num_outputs, width]
    levels = parts.float()
    if call.LOW_LEVELS is not None:
        octets = b"".join(half.to_bytes(8, "little", signed=True) for half in (call.LOW_LEVELS, call.HIGH_LEVELS))
        levels = torch.tensor(list(octets), dtype=torch.float32)[parts.long()]
    if call.FLOATS is not None:
        levels = parts.view(torch.float8_e4m3fn if call.FLOATS == "e4m3" else torch.float8_e5m2).float()

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
    width, per_byte, num_parts = call.WIDTH, call.PER_BYTE, grid[1]
    require_rows("rows", call.rows, call.row_stride, call.rows.dtype, num_rows, call.num_inputs)
    require((call.num_rows, call.num_outputs) == (num_rows, num_outputs), "sizes do not match the output")
    require(call.num_blocks * per_byte * width >= call.num_inputs, "the blocks lack inputs")
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
        size = call.blocks_per_part * per_byte * width
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
    num_blocks = -(-num_inputs // (call.WIDTH * call.PER_BYTE))
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


def grouped_coded_linear(call: Any, grid: tuple[int, ...]) -> Compute:
    """kernels.experts.triton.coded_experts.grouped_coded_linear_kernel."""
    num_experts, num_blocks, num_outputs, _ = call.codes.shape
    _require_codes(call, num_blocks, num_experts)
    require(call.num_blocks == num_blocks, f"{call.num_blocks} is not the number of blocks, {num_blocks}")
    require(call.num_blocks * call.PER_BYTE * call.WIDTH >= call.num_inputs, "the blocks lack inputs")
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
}

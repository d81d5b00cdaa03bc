"""What the C kernels must compute, as plainly as torch allows. Attention's reference is kernels/attention/reference.py.

Tests compare the kernels with these functions, which are slow and never used to serve.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from kernels.coded_weight import BLOCK_INPUTS, CodedMatrix, CodeFormat, decode
from kernels.cpu.linear import WeightKind
from kernels.layer_ops.base import Activation
from kernels.sampling.exact_math import noisy_logits, scores_of


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: WeightKind) -> torch.Tensor:
    """Compute `kernels.cpu.linear.linear`: x W^T + b, float32, of [rows, in] and [out, in] in the type of ``kind``."""
    match kind:
        case WeightKind.FLOAT32:
            product = x.double() @ weight.double().t()
        case WeightKind.BFLOAT16:
            product = x.bfloat16().double() @ weight.bfloat16().double().t()
        case WeightKind.INT8:
            (rows, row_scales), (outputs, output_scales) = quantize(x), quantize(weight)
            product = rows.double() @ outputs.double().t() * row_scales * output_scales.t()
        case WeightKind.CODED | WeightKind.FLOAT_CODED:
            raise AssertionError("coded weights have a format: see coded_linear")
    return (product if bias is None else product + bias).float()


def tiled_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the bits of x W^T in bfloat16 with AMX's tiles, float32, of [rows, in] and [out, in].

    Of every 32 inputs the even and the odd ones are summed apart, by fused multiply-adds: float64 rounds like them but
    for one sum in 2^29. Then the two sums are added to that of earlier inputs. Where a denormal number arises,
    `torch.set_flush_denormal` must be on, as the tiles round it to 0.
    """
    words = [
        F.pad(matrix.bfloat16().double(), (0, -matrix.shape[1] % 32)).view(len(matrix), -1, 16, 2)
        for matrix in (x, weight)
    ]
    total = torch.zeros(len(x), len(weight))
    for rows, outputs in zip(*(matrix.unbind(1) for matrix in words), strict=True):  # [rows, 16, 2], [outputs, 16, 2]
        sums = torch.zeros(len(x), len(weight), 2)
        for word in range(16):
            sums = (sums.double() + rows[:, None, word] * outputs[None, :, word]).float()
        total += sums[..., 0] + sums[..., 1]
    return total


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [rows, width] and float32 scales [rows, 1]: the largest element of a row becomes 127 or -127."""
    largest = x.float().abs().amax(dim=1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # 127 / x would round twice
    return (x.float() * inverse).round().to(torch.int8), largest / 127


def coded_linear(x: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
    """Compute `kernels.cpu.linear.linear` with coded weights: x W^T, float32, of [rows, in] and [out, in]."""
    if (order := matrix.input_order) is not None:  # activations are quantized in blocks of neighbouring codes
        x = x[:, order.long()]
        matrix = replace(matrix, input_order=None)
    return (coded_rows(x, matrix.format).double() @ decode(matrix).double().t()).float()


def tiled_coded_linear(x: torch.Tensor, matrix: CodedMatrix) -> torch.Tensor:
    """Compute the bits of `coded_linear` with AMX's tiles, for codes that are floats.

    The sum of at most 128 inputs with one scale is that of `tiled_linear`. Times the scale it is added to that of
    earlier inputs, by a fused multiply-add, which float64 rounds like.
    """
    form = matrix.format
    width = min(form.group, 128)
    total = torch.zeros(len(x), len(matrix.codes))
    for start in range(0, x.shape[1], width):
        codes = matrix.codes[:, start : start + width].view(form.code_dtype).float()
        sums = tiled_linear(x[:, start : start + width], codes).double()
        total = (matrix.outer_scales[:, start // form.group].double() * sums + total).float()
    return total if matrix.output_scales is None else total * matrix.output_scales


def coded_rows(x: torch.Tensor, form: CodeFormat) -> torch.Tensor:
    """Return rows [rows, width] as they are multiplied with codes of a format."""
    return quantize_blocks(x) if form.floats is None else x.bfloat16()


def quantize_codes(weight: torch.Tensor, bits: int) -> CodedMatrix:
    """Compute `kernels.cpu.coded_linear.quantize_codes`."""
    num_rows, width = weight.shape
    half, groups = float(1 << bits - 1), F.pad(weight.float(), (0, -width % BLOCK_INPUTS)).view(-1, BLOCK_INPUTS)
    extremes = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    parts = torch.where(extremes == 0, 0.0, groups / extremes)
    best, most_explained = torch.zeros(len(groups), 1), torch.zeros(len(groups), 1)
    for step in range(-4, 5):
        codes = (parts * -(half + 0.2 * step)).round().clamp(-half, half - 1)
        product, square = (parts * codes).sum(1, keepdim=True), codes.square().sum(1, keepdim=True)
        explained = torch.where(square > 0, product * product / square, 0.0)
        best = torch.where(explained > most_explained, product / square, best)
        most_explained = torch.maximum(explained, most_explained)
    scales = (best * extremes).bfloat16()
    codes = (groups * torch.where(scales == 0, 0.0, 1 / scales.float())).round().clamp(-half, half - 1) + half
    return CodedMatrix(
        format=CodeFormat(bits=bits, outer_type="bfloat16", zero=half),
        codes=codes.view(num_rows, -1)[:, :width].to(torch.uint8),
        outer_scales=scales.view(num_rows, -1),
    )


def quantize_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, width] rounded to int8 in blocks of 32 elements, the largest of which is 127 or -127."""
    num_rows, width = x.shape
    blocks = F.pad(x, (0, -width % BLOCK_INPUTS)).view(-1, BLOCK_INPUTS)
    codes, scales = quantize(blocks)
    return (codes.float() * scales).view(num_rows, -1)[:, :width]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide rows [..., width] by their root mean square, and multiply by ``weight`` [width]."""
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: torch.Tensor, rope: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate heads [num_tokens, num_heads, head_dim] by cosines and sines, ``rope`` [length, 2, head_dim // 2]."""
    cosines, sines = rope[positions].unsqueeze(2).unbind(1)  # [num_tokens, 1, head_dim // 2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def gated(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: Activation = "silu"
) -> torch.Tensor:
    """Return down(activation(gate(x)) * up(x)) of [num_tokens, hidden_size]; the weights are [outputs, inputs]."""
    gates = x @ gate.t()
    activated = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return (activated * (x @ up.t())) @ down.t()


def cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return the scores with a soft-cap."""
    return softcap * torch.tanh(scores / softcap)


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.cpu.sampling.top_k`: the k highest scores of each row and their indices, equal ones by index."""
    ordered, indices = scores.sort(dim=1, descending=True, stable=True)
    return ordered[:, :k], indices[:, :k]


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, floors: torch.Tensor | None, keys: torch.Tensor
) -> torch.Tensor:
    """Return the noisy logits [rows, vocab_size]; `kernels.cpu.sampling.draw` returns the largest of each row."""
    noisy = noisy_logits(logits, temperatures, keys)
    return noisy if floors is None else noisy.masked_fill(scores_of(logits, temperatures) < floors, -torch.inf)


def argmax_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `argmax.argmax_rows`."""
    return rows.amax(dim=1), rows.argmax(dim=1)

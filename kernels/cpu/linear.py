"""PackedLinear: a linear layer's weights packed for the C kernels, and the product with them.

csrc/linear/linear.h draws the layout. A weight is packed once, part by part; the tensors it came from are not needed
afterwards.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch.nn import functional as F

from kernels.coded_weight import CodedWeight
from kernels.cpu.bindings import CRows, CWeight, address
from kernels.cpu.library import require
from kernels.cpu.memory import huge_zeros
from kernels.layer_ops.base import Activation

__all__ = [
    "LANES",
    "PANELS_AT_ONCE",
    "PackedLinear",
    "WeightKind",
    "activation_number",
    "has_int8",
    "has_tiles",
    "linear",
    "put_lanes",
    "words_per_row",
]

LANES = 16  # outputs that the kernels compute together, a panel
PANELS_AT_ONCE = 4  # the kernels read panels in fours, so memory is allocated for whole fours
_STORE = 0  # PAGODA_STORE: the output is overwritten
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}  # as in csrc/linear/linear.h
_RELU_SQUARED = 2


class WeightKind(IntEnum):
    """The type of packed weights, and of the activations that are multiplied with them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # per output, symmetric; activations are quantized row by row
    CODED = 3  # see kernels/coded_weight.py; activations are quantized in blocks of 32 inputs
    FLOAT_CODED = 4  # codes that are floats; activations are bfloat16

    @property
    def has_output_sums(self) -> bool:
        """Whether each output has a scale, and the sum of its weights is kept."""
        return self is WeightKind.INT8

    @property
    def is_coded(self) -> bool:
        """Whether the weights are codes, whose formats their sections have."""
        return self in (WeightKind.CODED, WeightKind.FLOAT_CODED)


def words_per_row(kind: WeightKind, in_features: int) -> int:
    """Return how many 32-bit words one row of ``in_features`` elements takes."""
    return int(require().pagoda_num_words(kind, in_features))


def activation_number(activation: Activation, *, has_gate: bool) -> int:
    """Return the kernels' number of a feed-forward's activation; without a gate it squares what a ReLU leaves."""
    return _ACTIVATIONS[activation] if has_gate else _RELU_SQUARED


def has_int8() -> bool:
    """Return whether the kernels multiply int8 on this machine, which takes AVX-512 VNNI."""
    return bool(require().pagoda_has_int8())


def has_tiles() -> bool:
    """Return whether the kernels multiply bfloat16, int8 and codes with AMX's tiles on this machine."""
    return bool(require().pagoda_has_tiles())


class PackedLinear:
    """Packed weights [out_features, in_features], zero until they are set.

    Args:
        kind: the type of the packed weights.
        in_features: elements of a row.
        out_features: rows.
        has_bias: whether there is a bias, which is kept in float32.

    Attributes:
        words: the packed weights, int32.
    """

    def __init__(self, kind: WeightKind, in_features: int, out_features: int, *, has_bias: bool = False) -> None:
        self.kind, self.in_features, self.out_features = kind, in_features, out_features
        panels = -(-out_features // (LANES * PANELS_AT_ONCE)) * PANELS_AT_ONCE
        num_words = words_per_row(kind, in_features)
        self.words = huge_zeros((panels * num_words * LANES,), torch.int32)  # unused lanes stay zero
        self._scales = torch.zeros(panels * LANES) if kind.has_output_sums else None
        self._sums = torch.zeros(panels * LANES, dtype=torch.int32) if kind.has_output_sums else None
        self._bias = torch.zeros(panels * LANES) if has_bias else None
        self.c_weight = CWeight(
            self.words.data_ptr(),
            address(self._scales),
            address(self._sums),
            address(self._bias),
            None,
            None,
            kind,
            in_features,
            out_features,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return self.words.nbytes

    def set_weight(
        self, weight: torch.Tensor | CodedWeight, *, first_output: int = 0, every: int = 1, offset: int = 0
    ) -> None:
        """Pack rows [n, in_features] of the weights, float32 or bfloat16 (others are converted).

        Zeros follow shorter rows.

        Args:
            weight: the rows.
            first_output: which output the first of them is.
            every: with ``offset``, panel i of 16 outputs becomes panel ``i * every + offset``, so that two matrices
                can be interleaved.
            offset: see ``every``.
        """
        assert isinstance(weight, torch.Tensor), "codes are packed by CodedLinear"
        missing = self.in_features - weight.shape[1]
        assert missing >= 0
        if missing:
            weight = F.pad(weight, (0, missing))
        if weight.dtype not in (torch.float32, torch.bfloat16):
            weight = weight.float()
        weight = weight.contiguous()
        require().pagoda_pack_weight(
            self.words.data_ptr(),
            address(self._scales),
            address(self._sums),
            weight.data_ptr(),
            weight.dtype == torch.bfloat16,
            self.kind,
            weight.shape[0],
            self.in_features,
            first_output,
            every,
            offset,
        )

    def set_bias(self, bias: torch.Tensor, *, every: int = 1, offset: int = 0) -> None:
        """Set the bias [n] of the outputs; ``every`` and ``offset`` as for the weights."""
        assert self._bias is not None
        put_lanes(self._bias, bias, every=every, offset=offset)


def put_lanes(
    lanes: torch.Tensor, values: torch.Tensor, *, first_output: int = 0, every: int = 1, offset: int = 0
) -> None:
    """Set a number of each of some outputs, in slices: torch would divide an index of a few thousand among threads.

    Args:
        lanes: of all panels, [panels * LANES].
        values: [n], of outputs from ``first_output`` on.
        first_output: as for `PackedLinear`.
        every: likewise.
        offset: likewise.
    """
    panels, done = lanes.view(-1, LANES), 0
    while done < len(values):
        panel, lane = divmod(first_output + done, LANES)
        start, num_whole = panel * every + offset, (len(values) - done) // LANES
        if lane == 0 and num_whole:
            count = num_whole * LANES
            panels[start : start + (num_whole - 1) * every + 1 : every] = values[done : done + count].view(-1, LANES)
        else:
            count = min(LANES - lane, len(values) - done)
            panels[start, lane : lane + count] = values[done : done + count]
        done += count


def linear(x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
    """Return x W^T + b, float32 [num_rows, out_features], for ``x`` [num_rows, in_features]."""
    x, num_rows = x.contiguous(), len(x)
    words = torch.empty(num_rows * words_per_row(weight.kind, weight.in_features), dtype=torch.int32)
    scales, output = torch.empty(num_rows), torch.empty(num_rows, weight.out_features)
    rows = CRows(words.data_ptr(), scales.data_ptr(), num_rows)
    require().pagoda_pack_rows_for(rows, x.data_ptr(), x.dtype == torch.bfloat16, weight.c_weight, None, 0.0)
    require().pagoda_linear(output.data_ptr(), weight.out_features, rows, weight.c_weight, _STORE)
    return output

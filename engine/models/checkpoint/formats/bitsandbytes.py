"""bitsandbytes: 4-bit codes of a table (NF4, FP4), or 8-bit integers.

X.weight                                 U8 [out * in / 2, 1]: the first element of two is in the high half
X.weight.absmax                          F32 scales for each block of, usually, 64 elements, in the order of memory;
                                         or U8 codes, if the scales are quantised ("double quantisation")
X.weight.quant_map                       F32 [16]: the number of each code
X.weight.nested_absmax, .nested_quant_map    the same for the codes of the scales: F32 for each 256, F32 [256]
X.weight.quant_state.bitsandbytes__nf4   U8: JSON with the weight's shape and the sizes of blocks

Experts may be stacked in one weight, whose blocks go on from one expert to the next; its name may be another than
`weight`, as `experts.gate_up_proj` and `experts.gate_up_proj.absmax`.

X.weight I8 [out, in], X.SCB F32 [out]: code * SCB / 127; X.weight_format, if it is there, is 0
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PackedWeight
from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.bitsandbytes import (
    byte_levels,
    dequantise_4bit,
    dequantise_int8,
    dequantise_nested,
)
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.stored import HIGH_NIBBLES, SIGNED_BYTES

__all__ = ["Bitsandbytes4Weight", "Bitsandbytes8Weight", "bitsandbytes_weights"]

_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NAMES = {
    "scales": "absmax",
    "table": "quant_map",
    "nested scales": "nested_absmax",
    "nested table": "nested_quant_map",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bitsandbytes4Weight(PackedWeight):
    """Parts ``weight``, ``scales``, ``table``, and ``nested scales`` and ``nested table`` if the scales are quantised.

    Attributes:
        table: the number of each code.
        block_size: elements with one scale.
        nested_block_size: scales with one nested scale; None: the scales are not quantised.
        offset: that quantised scales are larger by.
    """

    format = "bitsandbytes 4-bit"
    is_tall = True
    table: tuple[float, ...]
    block_size: int
    nested_block_size: int | None
    offset: float

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept; None if an output begins within 16 inputs of a block.

        Blocks go on from one output to the next. So neighbours with one scale in each output are as many as divide
        both a block and an output.
        """
        if (levels := byte_levels(self.table)) is None:
            return None
        columns, zero = self.shape[-1], float(levels.ZERO)
        return format_of_groups(4, self._group, columns, torch.float32, zero=zero, levels=levels.levels)

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        return f"their outputs, of {self.shape[-1]} inputs each, begin within groups of 16 inputs with one scale"

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes. Levels of a byte are nearly the table's numbers: see `byte_levels`."""
        form, levels, columns = self.code_format, byte_levels(self.table), self.shape[-1]
        assert form is not None
        assert levels is not None
        first, last = rows.start * columns, rows.stop * columns
        scales = self._scales(parts, first, last)
        if columns % self.block_size:  # blocks go on from one output to the next
            scales = scales[torch.arange(first, last, self._group) // self.block_size - first // self.block_size]
        codes, scales = self._octets(parts, rows).view(len(rows), -1), scales.view(len(rows), -1) * levels.scale
        return coded_groups(form, codes, scales, layout=HIGH_NIBBLES, num_inputs=columns)

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return True

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        columns = self.shape[-1]
        first, last = rows.start * columns, rows.stop * columns
        scales, table = self._scales(parts, first, last), parts["table"].view(-1)
        octets, elements = self._octets(parts, rows), None if out is None else out.view(-1)
        values = dequantise_4bit(octets, table, scales, self.block_size, first % self.block_size, out=elements)
        return values[: last - first].view(len(rows), columns)

    @property
    def _group(self) -> int:
        return math.gcd(self.block_size, self.shape[-1])

    def _octets(self, parts: Mapping[str, torch.Tensor], rows: range) -> torch.Tensor:
        octets, columns = parts["weight"].view(-1), self.shape[-1]
        if "weight" in self.read_by_rows:
            return octets
        return octets[rows.start * columns // 2 : -(-rows.stop * columns // 2)]

    def _scales(self, parts: Mapping[str, torch.Tensor], first: int, last: int) -> torch.Tensor:
        """Return the scales of the blocks that have elements from ``first`` to ``last``, float32."""
        scales = parts["scales"].view(-1)
        first_block, last_block = first // self.block_size, -(-last // self.block_size)
        if "scales" not in self.read_by_rows:
            scales = scales[first_block:last_block]
        if self.nested_block_size is None:
            return scales
        nested, table = parts["nested scales"].view(-1), parts["nested table"].view(-1)
        return dequantise_nested(scales, table, nested, self.nested_block_size, self.offset, first=first_block)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bitsandbytes8Weight(PackedWeight):
    """Parts ``weight`` and ``maxima``."""

    format = "bitsandbytes 8-bit"

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of the matrix in float32."""
        return dequantise_int8(parts["weight"], parts["maxima"].view(-1)[rows.start : rows.stop])

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are."""
        columns = self.shape[-1]
        return format_of_groups(8, columns, columns, torch.float32, zero=128.0)

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        form, maxima = self.code_format, parts["maxima"].view(-1, 1)[rows.start : rows.stop]
        assert form is not None
        codes = parts["weight"].view(torch.uint8)
        return coded_groups(form, codes, maxima / 127, layout=SIGNED_BYTES, num_inputs=self.shape[-1])

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return True


def bitsandbytes_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the weights of a module that are one of these.

    Raises:
        ModelLoadError: if its tensors do not fit each other.
    """
    for state in [name for name in module.tensors if name.endswith(_STATES)]:
        name = state.partition(".")[0]
        if module.find(name) is not None:
            yield _four_bits(module, name, state)
    weight = module.tensors.get("weight")
    if weight is None:
        return
    if weight.dtype == "I8" and len(weight.shape) == 2 and module.find("SCB") is not None:
        maxima, layout = module.tensors["SCB"], module.find("weight_format")
        if maxima.dtype != "F32" or math.prod(maxima.shape) != weight.shape[0]:
            raise module.error("SCB", f"is {maxima.dtype} {list(maxima.shape)}, and the weight {list(weight.shape)}")
        if layout is not None and any(module.read(module.tensors[layout])):
            raise module.error("weight_format", "is not 0: the weight is not in rows, but in an order for one GPU")
        module.take(layout=layout)
        yield Bitsandbytes8Weight(
            name=module.full_name("weight"),
            parts=module.take(weight="weight", maxima="SCB"),
            shape=weight.shape,
            read_by_rows=frozenset({"weight"}),
        )


def _four_bits(module: ModuleTensors, name: str, state_name: str) -> PackedWeight:
    state = _state(module, state_name)
    shape, block_size, nested_size, offset = _sizes(module, state_name, state)
    num_scales = -(-math.prod(shape) // block_size)
    expected = {"weight": ("U8", -(-math.prod(shape) // 2)), "table": ("F32", 16)}
    if nested_size is None:
        expected["scales"] = ("F32", num_scales)
    else:
        expected["scales"] = ("U8", num_scales)
        expected["nested scales"] = ("F32", -(-num_scales // nested_size))
        expected["nested table"] = ("F32", 256)
    names: dict[str, str | None] = {part: name if part == "weight" else f"{name}.{_NAMES[part]}" for part in expected}
    for part, (dtype, count) in expected.items():
        stored = str(names[part])
        if module.find(stored) is None:
            raise module.error(name, f"has no {module.full_name(stored)} beside it")
        tensor = module.tensors[stored]
        if tensor.dtype != dtype or math.prod(tensor.shape) != count:
            raise module.error(
                stored, f"is {tensor.dtype} {list(tensor.shape)}, but a weight of {list(shape)} needs {count} {dtype}"
            )
    table = torch.frombuffer(bytearray(module.read(module.tensors[str(names["table"])])), dtype=torch.float32)
    module.take(state=state_name)
    of_rows = {"weight": shape[-1] % 2 == 0, "scales": shape[-1] % block_size == 0}
    return Bitsandbytes4Weight(
        name=module.full_name(name),
        parts=module.take(**names),
        shape=shape,
        read_by_rows=frozenset(part for part, has_whole_rows in of_rows.items() if has_whole_rows),
        row_multiple=2,  # whole bytes
        table=tuple(table.tolist()),
        block_size=block_size,
        nested_block_size=nested_size,
        offset=offset,
    )


def _state(module: ModuleTensors, name: str) -> dict[str, Any]:
    try:
        state = json.loads(module.read(module.tensors[name]).decode())
    except (ValueError, RecursionError) as error:
        raise module.error(name, f"is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise module.error(name, f"holds a {type(state).__name__}, not an object")
    return state


def _sizes(module: ModuleTensors, name: str, state: dict[str, Any]) -> tuple[tuple[int, ...], int, int | None, float]:
    """Return the weight's shape, elements of a block, scales of a nested block, and what those are larger by."""
    shape: Any = state.get("shape")
    block_size: Any = state.get("blocksize")
    nested_size: Any = state.get("nested_blocksize")
    offset = state.get("nested_offset", 0.0)
    if not (isinstance(shape, list) and len(shape) in (2, 3) and all(_is_size(size) for size in shape)):
        raise module.error(name, f"has the shape {shape!r:.80}, which is not that of matrices")
    for key, size in (("blocksize", block_size), ("nested_blocksize", nested_size)):
        if not _is_size(size) and not (size is None and key == "nested_blocksize"):
            raise module.error(name, f"has {key}={size!r:.80}, which is not a size")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise module.error(name, f"has nested_offset={offset!r:.80}, which is not a number")
    return tuple(shape), block_size, nested_size, float(offset)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31

"""FP8: a code for each weight, and scales for the tensor, for each output or for blocks.

`X.weight` F8_E4M3 [out, in], and one of

    X.weight_scale_inv   [ceil(out / 128), ceil(in / 128)], or a scalar with Mistral's models; it multiplies
    X.weight_scale       a scalar, [out], [out, 1] or blocks (compressed-tensors, ModelOpt, FBGEMM)
                         [blocks of rows, 1, blocks of columns, 1] (ModelOpt's FP8_PB_WO)
                         U8 or E8M0 exponents [out, in / 32] (MXFP8)
    X.scale              E8M0 blocks of DeepSeek's newest models

Stacked experts have the same with an expert's index as the first dimension, or a scale for all of them, and names as
`experts.down_proj_scale_inv`; ModelOpt's are `experts.down_proj_weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from engine.models.checkpoint.formats.groups import why_not_coded
from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PART_DTYPES, PackedWeight
from engine.models.config.files.quantization import Quantization
from kernels.coded_weight import SMALLEST_NOT_FINITE, Activations, CodedMatrix, CodeFormat, Floats, StoredLayout
from kernels.cpu.stored_codes import largest_octet
from kernels.dequant.coded_groups import coded_groups, format_of_groups
from kernels.dequant.fp8 import dequantise_fp8
from kernels.dequant.scales import row_scales

__all__ = ["Fp8Weight", "fp8_weights"]

_FLOATS: dict[str, Floats] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_EXPONENTS = ("U8", "F8_E8M0")
_FLOAT_SCALES = ("F32", "BF16", "F16")
_SCALES = (*_FLOAT_SCALES, *_EXPONENTS)
_INPUT_SCALES = ("input_scale", "activation_scale")
_ONE = ((), (1,))  # shapes of one number
_USUAL_BLOCK, _MX_COLUMNS = 128, 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp8Weight(PackedWeight):
    """Parts ``weight`` and ``scale``, and ``input_scale`` if activations have one that the checkpoint knows.

    Attributes:
        block: rows and columns that have one scale.
        quantises_activations: whether the scheme quantises them to the same floats.
    """

    format = "FP8"
    block: tuple[int, int]
    quantises_activations: bool = False

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of one matrix in float32."""
        return dequantise_fp8(parts["weight"], _grid(parts), self.block, rows.start, out=out)

    @property
    def code_format(self) -> CodeFormat | None:
        """How its codes are kept as they are."""
        dtype, floats = self.parts["scale"].dtype, _FLOATS[self.parts["weight"].dtype]
        scales = torch.bfloat16 if self._has_exponents else PART_DTYPES[dtype]  # bfloat16 has all powers of two
        form = format_of_groups(8, self.block[1], self.shape[-1], scales, floats=floats)
        return None if form is None else replace(form, activations=self._activations)

    @property
    def _activations(self) -> Activations | None:
        """Which activations have one scale, of the schemes that GPUs multiply in FP8."""
        if not self.quantises_activations or self._has_exponents or self.parts["weight"].dtype != "F8_E4M3":
            return None
        if self.block[1] >= self.shape[-1]:
            return "tokens"
        return "groups" if self.block[1] == _USUAL_BLOCK and "input_scale" not in self.parts else None

    @property
    def why_not_coded(self) -> str:
        """Why it has no ``code_format``."""
        return why_not_coded(self.block[1])

    def coded(self, parts: Mapping[str, torch.Tensor], rows: range) -> CodedMatrix:
        """Return rows of the matrix as codes."""
        form, scales = self.code_format, _grid(parts)
        assert form is not None
        scales = scales.view(torch.uint8) if self._has_exponents else scales
        codes, scales = parts["weight"].view(torch.uint8), row_scales(scales, self.block[0], rows.start, len(rows))
        layout = StoredLayout("bytes", "e8m0" if self._has_exponents else None)
        matrix = coded_groups(form, codes, scales, layout=layout, num_inputs=self.shape[-1])
        if form.activations is None or "input_scale" not in parts:
            return matrix
        return replace(matrix, activation_scales=parts["input_scale"].float().view(1).expand(len(codes)).contiguous())

    @property
    def keeps_stored_codes(self) -> bool:
        """Whether the codes are the stored bytes."""
        return True

    def are_codes_finite(self, octets: torch.Tensor) -> bool:
        """Whether no code is a NaN or infinite."""
        return largest_octet(octets, 0x7F) < SMALLEST_NOT_FINITE[_FLOATS[self.parts["weight"].dtype]]

    @property
    def _has_exponents(self) -> bool:
        return self.parts["scale"].dtype in _EXPONENTS


def _grid(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the scales of all blocks, [block rows, block columns]."""
    scale = parts["scale"]
    return scale.view(-1, 1) if scale.dim() < 2 else scale


def fp8_weights(module: ModuleTensors) -> Iterator[PackedWeight]:
    """Yield the FP8 weights of a module.

    Raises:
        ModelLoadError: if the scales do not fit the weight.
    """
    for name, codes in list(module.tensors.items()):
        further = "scale" if name == "weight" else f"{name}_weight_scale"
        scale = module.find(f"{name}_scale_inv", f"{name}_scale", further)
        if codes.dtype in _FLOATS and len(codes.shape) >= 2 and scale is not None:
            _squeeze_blocks(module, scale, len(codes.shape))
            block = _block(module, scale, codes.shape)
            shared = frozenset({"scale"} if module.tensors[scale].shape in _ONE else ())
            input_scale = _input_scale(module) if name == "weight" and len(codes.shape) == 2 else None
            yield Fp8Weight(
                name=module.full_name(name),
                parts=module.take(weight=name, scale=scale, input_scale=input_scale),
                shape=codes.shape,
                read_by_rows=frozenset({"weight"}),
                shared=shared | {"input_scale"},
                block=block,
                quantises_activations=input_scale is not None or module.quantization.quantises_activations,
            )


def _input_scale(module: ModuleTensors) -> str | None:
    """Return the name of the one scale that a module's activations have; None: scales follow from them."""
    name = module.find(*_INPUT_SCALES)
    if name is None or module.tensors[name].shape not in _ONE or module.tensors[name].dtype not in _FLOAT_SCALES:
        return None
    return name


def _squeeze_blocks(module: ModuleTensors, name: str, dimensions: int) -> None:
    """Remove the dimensions of 1 that ModelOpt keeps after the number of block rows and that of block columns."""
    scale = module.tensors[name]
    if len(scale.shape) == dimensions + 2 and scale.shape[-1] == scale.shape[-3] == 1:
        module.tensors[name] = scale._replace(shape=(*scale.shape[:-3], scale.shape[-2]))


def _block(module: ModuleTensors, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns that have one scale.

    Raises:
        ModelLoadError: if the scales have another type, or do not divide the weight into blocks of the config's size.
    """
    scale, stacked = module.tensors[name], shape[:-2]
    grid = scale.shape[len(stacked) :]
    if scale.dtype not in _SCALES:
        raise module.error(name, f"has the dtype {scale.dtype}, which scales do not have")
    if scale.shape in _ONE:
        return max(shape[-2], 1), max(shape[-1], 1)  # of all matrices
    if scale.shape[: len(stacked)] != stacked or len(grid) > 2:
        raise module.error(name, f"has the shape {list(scale.shape)}, which is not that of scales of {list(shape)}")
    is_mx = scale.dtype == "U8" or (scale.dtype in _EXPONENTS and grid == (shape[-2], -(-shape[-1] // _MX_COLUMNS)))
    usual = (1, _MX_COLUMNS) if is_mx else configured_block(module.quantization)
    counts = (*grid, *(1,) * (2 - len(grid)))
    rows, columns = (
        _block_size(size, count, block) for size, count, block in zip(shape[-2:], counts, usual, strict=True)
    )
    if rows is None or columns is None:
        raise module.error(
            name, f"has the shape {list(scale.shape)}, but blocks of {list(usual)} of {list(shape)} need another number"
        )
    return rows, columns


def _block_size(size: int, count: int, usual: int) -> int | None:
    """Return how many rows or columns have one of ``count`` scales; None if that does not fit."""
    if count == 1:
        return max(size, 1)
    if count == size:
        return 1
    return usual if count == -(-size // usual) else None


def configured_block(quantization: Quantization) -> tuple[int, int]:
    """Return the rows and columns of a block, as the config has them; 128 each where it does not say.

    Raises:
        ModelLoadError: if the config says something else.
    """
    block = quantization.fields.get("weight_block_size")
    if block is None:
        return _USUAL_BLOCK, _USUAL_BLOCK
    match block:
        case [int(rows), int(columns)] if 0 < rows < 2**31 and 0 < columns < 2**31:
            return rows, columns
    raise quantization.error(f"has weight_block_size={block!r:.80}, which is not two sizes")

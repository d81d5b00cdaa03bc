"""Fp4ByInputsWeight: stacked FP4 weights of models that multiply by [inputs, outputs], as ModelOpt writes them.

experts.gate_up_proj                 U8 [experts, in / 2, out]: the even input in the low half
experts.gate_up_proj_weight_scale    F8_E4M3 [experts, in / 16, out] of NVFP4, U8 [experts, in / 32, out] of MXFP4
experts.gate_up_proj_weight_scale_2  of NVFP4, one number or one for each expert; it multiplies

Llama 4 and GPT-OSS have them. fp4.py finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.checkpoint.packed_weight import PackedWeight
from kernels.dequant.fp4 import dequantise_fp4
from kernels.dequant.fp8 import e4m3_numbers
from kernels.dequant.scales import e8m0_numbers

__all__ = ["Fp4ByInputsWeight"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fp4ByInputsWeight(PackedWeight):
    """Parts ``weight``, ``scale`` and, of NVFP4, ``global scale``, which divides if ``divides``.

    A scale is of ``row_multiple`` rows, which are inputs.
    """

    format = "FP4"
    divides: bool

    def dequantise(
        self, parts: Mapping[str, torch.Tensor], rows: range, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of one matrix in float32: columns of what the kernel of the other order decodes."""
        group = self.row_multiple
        octets = parts["weight"][rows.start // 2 : -(-rows.stop // 2)].t().contiguous()
        scales = parts["scale"][rows.start // group : -(-rows.stop // group)].view(torch.uint8).t().contiguous()
        turned = torch.empty(len(octets), 2 * octets.shape[1])
        return dequantise_fp4(octets, scales, group, scale_table=self._table(parts), out=turned).t()

    def _table(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what each byte of the scales means."""
        factor = parts.get("global scale")
        if factor is None:
            return e8m0_numbers()
        factor = factor.float().flatten()
        return e4m3_numbers() / factor if self.divides else e4m3_numbers() * factor

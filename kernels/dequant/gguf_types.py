"""The types of ggml's tensors that are read, and the sizes of their blocks. Imports no torch: headers need them too."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GGUF_TYPES", "GgufType"]


class GgufType(NamedTuple):
    """One type of ggml's tensors."""

    name: str  # as ggml calls it
    block_elements: int  # 1 for numbers that are stored as they are
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of ``columns`` elements, a multiple of the block's."""
        return columns // self.block_elements * self.block_bytes


GGUF_TYPES = {  # by ggml's numbers
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    20: GgufType("IQ4_NL", 32, 18),
    23: GgufType("IQ4_XS", 256, 136),
    30: GgufType("BF16", 1, 2),
    39: GgufType("MXFP4", 32, 17),
}

"""GgufWeight: how a GGUF file stores one weight of a model, and the weights of experts that it stacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.gguf.header import GgufTensor

__all__ = ["EXPERTS", "GgufWeight", "holds_experts", "of_each_expert"]

EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_GATES_AND_UPS = "ffn_gate_up_exps"  # of one stack, which the converter writes if it is asked to
_MAX_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class GgufWeight:
    """One weight of a model, as the file stores it.

    Attributes:
        parts: the stored tensor, or the two whose rows or columns alternate, or are joined.
        shape: of the weight as transformers has it.
        heads: if not 0, element i of the first half of each of this many heads is stored beside element i of the second
            half, so that RoPE rotates neighbours (Llama's queries and keys).
        has_one_added: 1 is to be subtracted (Gemma's norms, which multiply by 1 + their weight).
        is_transposed: rows are stored as columns, the matrices of experts one after another (GPT-OSS).
        is_joined: the rows of the second part follow those of the first (Granite's gates and ups).
        is_decay: the logarithm of the negated number is the weight (A_log of recurrent layers).
        row_order, column_order: which stored row or column each one is; None: they are in order.
    """

    parts: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    heads: int = 0
    has_one_added: bool = False
    is_transposed: bool = False
    is_joined: bool = False
    is_decay: bool = False
    row_order: tuple[int, ...] | None = None
    column_order: tuple[int, ...] | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the numbers are not those of one stored tensor in its order."""
        is_in_order = self.row_order is None and self.column_order is None
        is_same = not (self.heads or self.has_one_added or self.is_transposed or self.is_decay)
        return len(self.parts) > 1 or not (is_in_order and is_same)


def holds_experts(module: str, kind: str | None, tensor: GgufTensor) -> bool:
    """Return whether a tensor stacks something of each expert; one of another shape keeps its name and is refused."""
    num_dimensions = 2 if kind == "bias" else 3
    is_known = module in EXPERTS or (module == _GATES_AND_UPS and tensor.shape[1 % len(tensor.shape)] % 2 == 0)
    return is_known and len(tensor.shape) == num_dimensions and tensor.shape[0] <= _MAX_EXPERTS


def of_each_expert(
    tensor: GgufTensor, block: str, module: str, kind: str, names: Mapping[str, str] = EXPERTS
) -> dict[str, GgufWeight]:
    """Return the weights of each expert of a stack, as ``block.expert.name.kind``; gates and ups may be in one stack.

    Args:
        tensor: the stack.
        block: of the experts.
        module: llama.cpp's name of the stack.
        kind: weight or bias.
        names: of the experts' matrices.
    """
    if module != _GATES_AND_UPS:
        return _of_each(tensor, f"{block}.{{}}.{names[module]}.{kind}", 0, 1)
    gates, ups = (f"{block}.{{}}.{names[part]}.{kind}" for part in ("ffn_gate_exps", "ffn_up_exps"))
    return _of_each(tensor, gates, 0, 2) | _of_each(tensor, ups, 1, 2)


def _of_each(tensor: GgufTensor, name: str, index: int, count: int) -> dict[str, GgufWeight]:
    """Return one of ``count`` equal parts of the rows of each expert."""
    size = (tensor.stop - tensor.start) // (tensor.shape[0] * count)
    shape = (tensor.shape[1] // count, *tensor.shape[2:])
    starts = {name.format(expert): tensor.start + (expert * count + index) * size for expert in range(tensor.shape[0])}
    return {
        own: GgufWeight(parts=(tensor._replace(shape=shape, start=start, stop=start + size),), shape=shape)
        for own, start in starts.items()
    }

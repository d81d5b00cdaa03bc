"""Groups of a weight's inputs that share a scale: their size, and the order of their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.checkpoint.formats.module_tensors import ModuleTensors
from engine.models.checkpoint.packed_weight import PART_DTYPES

__all__ = ["InputGroups", "group_size_of", "sizes_in", "stored_groups", "why_not_coded"]


def group_size_of(columns: int, num_groups: int, sizes: Iterable[int]) -> int | None:
    """Return the size of ``num_groups`` groups of columns; None if no size fits.

    Args:
        columns: of the weight.
        num_groups: of them.
        sizes: that the config names. They are needed where the last group is smaller than the others.
    """
    if num_groups == 1:
        return max(columns, 1)
    for size in sizes:
        if -(-columns // size) == num_groups:
            return size
    return columns // num_groups if num_groups and columns % num_groups == 0 and columns else None


@dataclass(frozen=True, eq=False)
class InputGroups:
    """The groups of inputs that ``desc_act`` or ``actorder`` has sorted.

    Attributes:
        order: int32 [columns], the inputs group by group; None if the groups do not have the same number of inputs each
            but for the last one.
    """

    order: torch.Tensor | None


def stored_groups(module: ModuleTensors, name: str, size: int) -> InputGroups | None:
    """Return the groups that a tensor gives for each input; None if the inputs of a group are neighbours.

    Args:
        module: whose tensor ``name`` is the group of each input; all are -1 where none was calibrated.
        name: see ``module``.
        size: inputs of a group.
    """
    stored = module.tensors[name]
    if not (columns := stored.shape[0]):
        return None
    groups = torch.frombuffer(bytearray(module.read(stored)), dtype=PART_DTYPES[stored.dtype])
    neighbours = torch.arange(columns, dtype=groups.dtype) // size
    if bool((groups == -1).all()) or torch.equal(groups, neighbours):
        return None
    order = groups.argsort(stable=True)
    return InputGroups(order.int() if torch.equal(groups[order], neighbours) else None)


def why_not_coded(group_size: int, groups: InputGroups | None = None) -> str:
    """Return why a weight with these groups has no ``code_format``."""
    if groups is not None and groups.order is None:
        return "their groups have different numbers of inputs"
    return f"groups of {group_size} inputs are not computed from their codes"


def sizes_in(value: Any, key: str = "group_size") -> list[int]:
    """Return the positive integers that ``key`` has anywhere in a JSON value, in order and each once."""
    sizes: dict[int, None] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if type(size := item.get(key)) is int and 0 < size < 2**31:
                sizes[size] = None
            waiting.extend(reversed(list(item.values())))
        elif isinstance(item, list):
            waiting.extend(reversed(item))
    return list(sizes)

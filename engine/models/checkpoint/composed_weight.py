"""ComposedWeight: a weight whose parts are weights of their own in the files, as other programs divide them.

A checkpoint's tensors may be divided otherwise than the model's: a tensor for each expert where the model stacks them,
or gates and ups apart where the model has them in one. Each member is read, or dequantised, to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, Union

import torch

from engine.models.checkpoint.files.safetensors_header import StoredTensor
from engine.models.checkpoint.packed_weight import PackedWeight
from engine.models.checkpoint.sharding import Shard
from engine.models.checkpoint.transposed_weight import transposed

__all__ = ["ComposedWeight", "Entry", "matrix_of", "read_composed", "stack", "tensors_of", "turned", "weights_of"]


@dataclass(frozen=True, eq=False)
class ComposedWeight:
    """A weight of several.

    Attributes:
        members: of one shape, but for the rows of ``rows``.
        layout: how they are put together: ``stacked`` along a new first dimension; one after another along the first
            (``rows``); or alternating along the last one (``alternating``).
    """

    members: tuple[Entry, ...]
    layout: Literal["stacked", "rows", "alternating"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        first = self.members[0].shape
        if self.layout == "stacked":
            return (len(self.members), *first)
        if self.layout == "rows":
            return (sum(member.shape[0] for member in self.members), *first[1:])
        return (*first[:-1], len(self.members) * first[-1])

    @property
    def path(self) -> Path:
        """The file that holds the first member."""
        return self.members[0].path


Entry: TypeAlias = Union[StoredTensor, PackedWeight, ComposedWeight]  # noqa: UP007  (a name of this file is used above)


def stack(members: Mapping[int, Entry]) -> ComposedWeight | None:
    """Return members by index as one weight; None unless the indices count from 0, and all have the same shape."""
    shapes = {member.shape for member in members.values()}
    if members.keys() != set(range(len(members))) or len(shapes) != 1:
        return None
    return ComposedWeight(tuple(members[index] for index in range(len(members))), "stacked")


def matrix_of(entry: StoredTensor | PackedWeight, index: int) -> StoredTensor | PackedWeight:
    """Return one of the matrices that a weight stacks along its first dimension."""
    if isinstance(entry, StoredTensor):
        return _slice(entry, index)
    parts = {name: part if name in entry.shared else _slice(part, index) for name, part in entry.parts.items()}
    return replace(entry, parts=parts, shape=entry.shape[1:])


def _slice(tensor: StoredTensor, index: int) -> StoredTensor:
    size = (tensor.stop - tensor.start) // tensor.shape[0]
    start = tensor.start + index * size
    return tensor._replace(shape=tensor.shape[1:], start=start, stop=start + size)


def turned(entry: Entry) -> Entry:
    """Return a weight with the shape that its matrices have when they are transposed."""
    if not isinstance(entry, ComposedWeight):
        return transposed(entry)
    assert entry.layout == "stacked"
    return ComposedWeight(tuple(map(turned, entry.members)), "stacked")


def weights_of(entry: Entry) -> Iterator[StoredTensor | PackedWeight]:
    """Yield the weights that make up an entry: itself, if it is not composed."""
    if isinstance(entry, ComposedWeight):
        for member in entry.members:
            yield from weights_of(member)
    else:
        yield entry


def tensors_of(entry: Entry) -> Iterator[StoredTensor]:
    """Yield the stored tensors of an entry."""
    for weight in weights_of(entry):
        if isinstance(weight, PackedWeight):
            yield from weight.parts.values()
        else:
            yield weight


Read: TypeAlias = Callable[[torch.Tensor, Entry, "Shard | None"], object]


def read_composed(read: Read, weight: ComposedWeight, out: torch.Tensor, shard: Shard | None) -> None:
    """Fill ``out``, contiguous, with a weight or a ``shard`` of it.

    Args:
        read: fills a tensor with another entry, or a shard of it.
        weight: what is read.
        out: of the weight's shape, or the shard's.
        shard: None for all of it.
    """
    if weight.layout == "stacked" and shard is None:
        for index, member in enumerate(weight.members):
            read(out[index], member, None)
    elif weight.layout == "stacked":
        assert shard is not None
        read(out, weight.members[shard.index], replace(shard, num_stacked=None, index=0))
    elif weight.layout == "rows":
        _read_rows(read, weight, out, shard)
    else:
        whole = torch.empty(weight.shape)
        for index, member in enumerate(weight.members):
            values = torch.empty(member.shape)
            read(values, member, None)
            whole[..., index :: len(weight.members)] = values
        out.copy_(whole if shard is None else whole.narrow(shard.dim, shard.start, shard.stop - shard.start))


def _read_rows(read: Read, weight: ComposedWeight, out: torch.Tensor, shard: Shard | None) -> None:
    begin, end = (shard.start, shard.stop) if shard is not None and shard.dim == 0 else (0, weight.shape[0])
    first = 0
    for member in weight.members:
        count = member.shape[0]
        start, stop = max(begin - first, 0), min(end - first, count)
        if start < stop:
            rows = out[first + start - begin : first + stop - begin]
            by_columns = shard is not None and shard.dim == 1
            read(rows, member, shard if by_columns else Shard(0, count, start, stop))
        first += count

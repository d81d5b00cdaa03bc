"""What kernels load and store in Triton's interpreter, by the address of every lane.

Traffic counts the bytes. Bounds finds what is beyond a launch's tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton.runtime import interpreter


class Traffic:
    """What all kernels loaded and stored since this object was made.

    Attributes:
        loaded, stored: bytes of all lanes that are not masked; a byte that two lanes load counts twice.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded = self.stored = 0
        self._addresses: dict[str, list[npt.NDArray[np.uint64]]] = {"loaded": [], "stored": []}
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(builder: Any, pointers: Any, mask: Any, *options: Any) -> Any:
            self.loaded += self._note("loaded", pointers, mask)
            return load(builder, pointers, mask, *options)

        def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
            self.stored += self._note("stored", pointers, mask)
            return store(builder, pointers, value, mask, *options)

        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_masked_store", counted_store)

    def _note(self, kind: str, pointers: Any, mask: Any) -> int:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[mask.data]
        self._addresses[kind].append((first[:, None] + np.arange(size, dtype=np.uint64)).ravel())
        return first.size * size

    @property
    def total(self) -> int:
        """Bytes loaded and stored."""
        return self.loaded + self.stored

    @property
    def distinct(self) -> int:
        """The same, where a byte that is loaded again comes from a cache."""
        return sum(len(np.unique(np.concatenate(addresses))) for addresses in self._addresses.values() if addresses)


class Bounds:
    """Fails a launch that loads or stores beyond its tensors, as compute-sanitizer does: the cause is an IndexError.

    A tensor ends with its last element, whatever follows in its storage.

    Attributes:
        num_checked: elements that were loaded or stored.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_checked = 0
        self._starts = self._ends = np.zeros(0, dtype=np.uint64)
        builder, call = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__

        def bounded_call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self._starts, self._ends = _merged([_extent(tensor) for tensor in tensors if tensor.numel()])
            return call(executor, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", bounded_call)
        for name, mask_at in (("masked_load", 1), ("masked_store", 2), ("atomic_rmw", 3)):
            access = getattr(builder, f"create_{name}")

            def checked(builder: Any, *args: Any, access: Any = access, mask_at: int = mask_at) -> Any:
                self._check(args[mask_at == 3], args[mask_at])  # the first argument of an atomic is its kind
                return access(builder, *args)

            monkeypatch.setattr(builder, f"create_{name}", checked)

    def _check(self, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[mask.data]
        if not first.size:
            return
        self.num_checked += first.size
        index = np.searchsorted(self._starts, first, side="right").astype(np.int64) - 1
        is_inside = (index >= 0) & (first + np.uint64(size) <= self._ends[np.maximum(index, 0)])
        if not is_inside.all():
            outside, count = int(first[~is_inside][0]), int((~is_inside).sum())
            after = [outside - int(end) for end in self._ends]
            raise IndexError(f"{count} elements of {size} bytes are beyond all tensors, by {after} bytes")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _merged(extents: list[tuple[int, int]]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the starts and ends of pieces of memory, ascending; those that overlap are one."""
    pieces: list[list[int]] = []
    for start, end in sorted(extents):
        if pieces and start <= pieces[-1][1]:
            pieces[-1][1] = max(pieces[-1][1], end)
        else:
            pieces.append([start, end])
    starts, ends = zip(*pieces, strict=True)
    return np.array(starts, dtype=np.uint64), np.array(ends, dtype=np.uint64)

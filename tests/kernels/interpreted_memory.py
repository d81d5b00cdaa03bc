"""Traffic: the bytes that kernels load and store, counted in Triton's interpreter by the address of every lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
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

"""KeyValue: what a layer of a model caches for each token. Models declare it; pools, copies and sizes follow from it.

A declaration is of one tensor-parallel rank's share of a layer. It knows neither the model nor the dtype, and needs no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["KeyValue", "bytes_per_token"]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key and a value for each KV head and token."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.heads * (self.key_dim + self.value_dim)


def bytes_per_token(layers: Iterable[KeyValue], element_size: int) -> int:
    """Return the bytes that one token takes in the caches of ``layers``.

    Args:
        layers: what each layer caches.
        element_size: bytes of one element.
    """
    return sum(layer.elements_per_token for layer in layers) * element_size

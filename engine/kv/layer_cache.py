"""What a layer caches: KeyValue, Latent, IndexKey, HiddenState, PrefixMark, State, SharedWith. Models declare it.

A declaration is of one tensor-parallel rank's share of a layer. It does not know the model, and needs no torch. Its
numbers have the model's dtype, unless it says that they are FP8. Pools follow from the declarations. A layer of
attention declares a KeyValue or a Latent, a recurrent one a State; one with both declares two. An attention layer that
reads the keys and values of an earlier layer declares a SharedWith. One that chooses the tokens it attends to declares
an IndexKey after its Latent. The layers of a draft model are declared after those of the model whose tokens it drafts,
with a PrefixMark; a layer of multi-token prediction (MTP) or an EAGLE-3 head declares a HiddenState, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kernels.attention.window import Chunk, Window, most_keys

__all__ = [
    "CacheDtype",
    "HiddenState",
    "IndexKey",
    "KeyValue",
    "Latent",
    "LayerCache",
    "PrefixMark",
    "SharedWith",
    "State",
    "TokenCache",
    "bytes_per_state",
    "bytes_per_token",
    "dtype_of",
    "in_dtype",
    "joined",
    "windows_of",
    "without_windows",
]

_STATE_ELEMENT_SIZE = 4
_MARK_BYTES = 8

CacheDtype = Literal["auto", "fp8"]  # auto: the model's


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key and a value for each KV head and token.

    Attributes:
        window: which tokens a token attends to: what lies before them is not kept. None: all.
        dtype: of the numbers; layers with the same window have the same one.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: Window | None = None
    dtype: CacheDtype = "auto"

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a token's key and value."""
        return (self.heads, self.key_dim), (self.heads, self.value_dim)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector for each token, from which the keys and values of all heads are computed (DeepSeek-V2, 2024).

    Every tensor-parallel rank keeps the same vectors.

    Attributes:
        rank: numbers of the latent, normalized.
        rope_dim: numbers of the key that all heads share, rotated; they follow the latent.
    """

    rank: int
    rope_dim: int

    @property
    def window(self) -> None:
        """None: all tokens are kept."""
        return None

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a token's vector."""
        return ((self.rank + self.rope_dim,),)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class IndexKey:
    """One key for each token, by which queries choose the tokens that they attend to (DeepSeek-V3.2, 2025).

    Every tensor-parallel rank keeps the same keys.

    Attributes:
        dim: numbers of the key.
    """

    dim: int

    @property
    def window(self) -> None:
        """None: all tokens are kept."""
        return None

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a token's key."""
        return ((self.dim,),)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.dim


@dataclass(frozen=True, slots=True)
class HiddenState:
    """A hidden state after each token, from which a layer of multi-token prediction (MTP) or an EAGLE-3 head drafts.

    Attributes:
        size: numbers of the hidden state.
    """

    size: int

    @property
    def window(self) -> None:
        """None: all tokens are kept."""
        return None

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a token's hidden state."""
        return ((self.size,),)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.size


@dataclass(frozen=True, slots=True)
class PrefixMark:
    """64 bits for each token, which say after which tokens the caches beside them were computed.

    Attributes:
        element_size: bytes of one number of the cache.
    """

    element_size: int

    @property
    def window(self) -> None:
        """None: all tokens are kept."""
        return None

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a token's mark, as numbers of the cache."""
        return ((self.elements_per_token,),)

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token takes."""
        return _MARK_BYTES // self.element_size


@dataclass(frozen=True, slots=True)
class State:
    """What a recurrence or a convolution remembers of a sequence's tokens so far: of each sequence, not of each token.

    Every state is float32, whatever the weights are. A rounded state would depend on where a prompt's chunks end.

    Attributes:
        shapes: of the tensors that a sequence has, without the slot.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def elements(self) -> int:
        """Numbers that one sequence takes."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, slots=True)
class SharedWith:
    """Nothing of its own: the layer reads what an earlier one caches (Gemma 3n and 4).

    Attributes:
        index: of that layer's declaration, which comes before this one and is not a SharedWith itself.
    """

    index: int


TokenCache = KeyValue | Latent | IndexKey | HiddenState | PrefixMark  # kept for each token, in pages
LayerCache = TokenCache | State | SharedWith


def windows_of(layers: Iterable[LayerCache]) -> tuple[Window, ...]:
    """Return the different windows of ``layers``, sliding ones before chunks, ascending; each has pages of its own."""
    windows = {layer.window for layer in layers if isinstance(layer, KeyValue) and layer.window is not None}
    return tuple(sorted(windows, key=lambda window: (isinstance(window, Chunk), most_keys(window))))


def without_windows(layers: Iterable[LayerCache]) -> tuple[LayerCache, ...]:
    """Return the declarations as if all keys and values were kept; benchmarks and tests compare with them."""
    return tuple(replace(layer, window=None) if isinstance(layer, KeyValue) else layer for layer in layers)


def in_dtype(layers: Iterable[LayerCache], dtype: CacheDtype) -> tuple[LayerCache, ...]:
    """Return the declarations with keys and values in ``dtype``; all others stay as they are."""
    return tuple(replace(layer, dtype=dtype) if isinstance(layer, KeyValue) else layer for layer in layers)


def dtype_of(layers: Iterable[LayerCache], window: Window | None) -> CacheDtype:
    """Return the dtype of what the layers with this window keep for each token."""
    dtypes = {
        layer.dtype if isinstance(layer, KeyValue) else "auto"
        for layer in layers
        if isinstance(layer, TokenCache) and layer.window == window
    }
    assert len(dtypes) <= 1, "layers of one pool have one dtype"
    return dtypes.pop() if dtypes else "auto"


def joined(layers: Sequence[LayerCache], others: Iterable[LayerCache]) -> tuple[LayerCache, ...]:
    """Return the declarations of two models that share their pages, the second one's after the first one's."""
    first = len(layers)
    moved = (SharedWith(other.index + first) if isinstance(other, SharedWith) else other for other in others)
    return (*layers, *moved)


def bytes_per_token(layers: Iterable[LayerCache], element_size: int, window: Window | None = None) -> int:
    """Return the bytes that one token takes in those caches of ``layers`` that have this window; states take none.

    Args:
        layers: what each layer caches.
        element_size: bytes of one number of the model's dtype.
        window: None: the layers that attend to everything.
    """
    layers = tuple(layers)
    size = 1 if dtype_of(layers, window) == "fp8" else element_size
    return size * sum(
        layer.elements_per_token for layer in layers if isinstance(layer, TokenCache) and layer.window == window
    )


def bytes_per_state(layers: Iterable[LayerCache]) -> int:
    """Return the bytes that the states of one sequence take."""
    return sum(layer.elements for layer in layers if isinstance(layer, State)) * _STATE_ELEMENT_SIZE

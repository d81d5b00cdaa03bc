"""Attention of transformers' models: translates what their modules ask for into paged attention.

transformers looks up an attention function and a mask function by a name in the model's config. Both are registered
here under NAME. The mask function returns what its mask means instead of a tensor. So each layer's window is the one
that transformers itself would mask with. A mask that is not causal is an error instead of being ignored.

    with attention_by(layers):     layers.attend(call) is called for each attention layer, in the model's order
        backbone(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.errors import ModelLoadError

__all__ = ["NAME", "AttentionCall", "AttentionLayers", "attention_by", "register"]

NAME = "pagoda_paged"

_FAR = 2**20  # tokens: a position beyond any window

# Arguments of transformers' attention functions that do not change what an evaluated text model computes.
_WITHOUT_EFFECT = frozenset({"dropout", "output_attentions", "position_ids", "training", "use_cache"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention layer of a model asks for. Tokens are packed, as in AttentionMetadata."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]


class AttentionLayers(Protocol):
    """Computes the attention of a model's layers.

    Attributes:
        checks_masks: whether the masks must still be checked. A check takes a millisecond, and the layers' masks are
            the same in every step.
    """

    checks_masks: bool

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention of the next layer, [num_tokens, num_heads, value_dim]."""


@dataclass(frozen=True, slots=True)
class _CausalMask:
    """What a mask of transformers means: all earlier tokens, or the last ``window`` ones."""

    window: int | None


_layers: ContextVar[AttentionLayers] = ContextVar("attention_layers")


@contextmanager
def attention_by(layers: AttentionLayers) -> Iterator[None]:
    """Let ``layers`` compute the attention of the models that this thread calls in the ``with``."""
    token = _layers.set(layers)
    try:
        yield
    finally:
        _layers.reset(token)


def register() -> None:
    """Make NAME known to transformers as an attention implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # slow to import
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _mask(*, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any) -> _CausalMask:
    """Return the meaning of a mask, with the arguments of transformers' mask functions.

    Args:
        mask_function: returns whether a query sees a key, from (batch index, head index, query index, key index).
        local_size: window or chunk in tokens, if the mask has one.

    Raises:
        ModelLoadError: if the mask is neither causal nor a causal sliding window.
    """
    if _layers.get().checks_masks:
        _require_causal(mask_function, local_size)
    return _CausalMask(local_size)


def _require_causal(mask_function: Callable[..., torch.Tensor], local_size: int | None) -> None:
    """Raise ModelLoadError unless a mask is causal, with a window of ``local_size`` tokens if that is given."""
    distances = {-_FAR, -1, 0, *(2**exponent for exponent in range(_FAR.bit_length()))}
    if local_size is not None:
        distances |= {local_size - 1, local_size, local_size + 1}
    distance = torch.tensor(sorted(distances))[None]
    queries = torch.tensor([[_FAR], [_FAR + 1]])  # at least one of them is not the last of a chunk
    expected = (distance >= 0) & (distance < (2 * _FAR if local_size is None else local_size))
    try:
        keys = queries - distance
        is_causal = torch.equal(mask_function(0, 0, queries, keys).expand(keys.shape), expected.expand(keys.shape))
    except IndexError:  # it looks up the tokens' groups, so it is about images or packed sequences
        is_causal = False
    if not is_causal:
        raise ModelLoadError("a layer's attention mask is neither causal nor a causal sliding window")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention, with the arguments of transformers' attention functions.

    Args:
        query: [1, num_heads, num_tokens, head_dim]; ``key`` and ``value`` likewise.
        attention_mask: from ``_mask``, which knows the window: ``sliding_window`` is only a hint for kernels.

    Returns:
        [1, num_tokens, num_heads, value_dim], and no attention weights.

    Raises:
        ModelLoadError: if the layer asks for anything but causal attention.
    """
    if not isinstance(attention_mask, _CausalMask):
        raise ModelLoadError(f"{type(module).__name__} has an attention mask of its own, or none")
    if (
        unknown := {name for name, given in others.items() if given is not None and given is not False}
        - _WITHOUT_EFFECT
    ):
        raise ModelLoadError(f"{type(module).__name__} asks for attention with {', '.join(sorted(unknown))}")
    call = AttentionCall(
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=attention_mask.window,
        softcap=softcap,
        sinks=s_aux,
    )
    return _layers.get().attend(call)[None], None

"""Attention over packed texts without a KV cache, for transformers' modules.

transformers looks up an attention function and a mask function by a name in the model's config. Both are registered
here under NAME. A forward pass sees all texts as one sequence; the attention function computes each text on its own,
so that no token sees another text and a text's result does not depend on the others. The mask function returns what
the model would mask with, as a function of two positions, which covers causal and bidirectional attention and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F

from engine.errors import ModelLoadError

__all__ = ["NAME", "packed_texts", "register"]

NAME = "pagoda_packed"

# Arguments of transformers' attention functions that do not change what an evaluated model computes. The mask says
# whether attention is causal, and knows the window: ``sliding_window`` is a hint for kernels.
_WITHOUT_EFFECT = frozenset(
    {"deterministic", "dropout", "is_causal", "output_attentions", "position_ids", "sliding_window", "use_cache"}
)

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


class _Mask:
    """What a layer's mask means, for texts of any length."""

    def __init__(self, function: MaskFunction, device: torch.device) -> None:
        self._function = function
        self._device = device
        self._by_length: dict[int, tuple[torch.Tensor | None, bool]] = {}

    def of(self, length: int) -> tuple[torch.Tensor | None, bool]:
        """Return (mask [length, length] or None, whether it is causal) for a text of ``length`` tokens."""
        if length not in self._by_length:
            self._by_length[length] = self._compute(length)
        return self._by_length[length]

    def _compute(self, length: int) -> tuple[torch.Tensor | None, bool]:
        positions = torch.arange(length, device=self._device)
        seen = self._function(0, 0, positions[:, None], positions[None, :])
        seen = torch.as_tensor(seen, device=self._device).expand(length, length)
        if bool(seen.all()):
            return None, False
        if torch.equal(seen, positions[:, None] >= positions[None, :]):
            return None, True
        return seen, False


_lengths: ContextVar[Sequence[int]] = ContextVar("text_lengths")


@contextmanager
def packed_texts(lengths: Sequence[int]) -> Iterator[None]:
    """Let the models that this thread calls in the ``with`` see texts of these lengths, one after the other."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def register() -> None:
    """Make NAME known to transformers as an attention implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # slow to import
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _mask(*, mask_function: MaskFunction, device: torch.device | str = "cpu", **_: Any) -> _Mask:
    return _Mask(mask_function, torch.device(device))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention, with the arguments of transformers' attention functions.

    Args:
        query: [1, num_heads, num_tokens, head_dim]; ``key`` and ``value`` [1, num_kv_heads, num_tokens, head_dim].
        attention_mask: from ``_mask``.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no attention weights.

    Raises:
        ModelLoadError: if the layer asks for anything else than softmax attention with that mask.
    """
    if not isinstance(attention_mask, _Mask):
        raise ModelLoadError(f"{type(module).__name__} has an attention mask of its own, or none")
    given = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := given - _WITHOUT_EFFECT:
        raise ModelLoadError(f"{type(module).__name__} asks for attention with {', '.join(sorted(unknown))}")
    shares_heads = key.shape[1] != query.shape[1]
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    start = 0
    for length in _lengths.get():
        part = slice(start, start + length)
        mask, is_causal = attention_mask.of(length)
        attended = F.scaled_dot_product_attention(
            query[:, :, part].contiguous(),  # at an aligned address: where a text lies in the batch must not matter
            key[:, :, part].contiguous(),
            value[:, :, part].contiguous(),
            attn_mask=mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=shares_heads,
        )
        output[part] = attended[0].transpose(0, 1)
        start += length
    return output[None], None

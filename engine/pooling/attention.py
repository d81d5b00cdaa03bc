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
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from engine.errors import ModelLoadError
from kernels.attention.c_kernel import PackedTexts, is_supported, packed_attention

__all__ = ["NAME", "packed_texts", "register"]

NAME = "pagoda_packed"

# Arguments of transformers' attention functions that do not change what an evaluated model computes. The mask says
# whether attention is causal, and knows the window: ``sliding_window`` is a hint for kernels.
_WITHOUT_EFFECT = frozenset(
    {"deterministic", "dropout", "is_causal", "output_attentions", "position_ids", "sliding_window", "use_cache"}
)

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


class _Mask:
    """What a layer's mask means, for texts of up to ``longest`` tokens: it says which positions a position sees."""

    def __init__(self, function: MaskFunction, longest: int, device: torch.device) -> None:
        self._function = function
        self._longest = longest
        self._device = device

    @cached_property
    def _seen(self) -> torch.Tensor:
        positions = torch.arange(self._longest, device=self._device)
        seen = self._function(0, 0, positions[:, None], positions[None, :])
        return torch.as_tensor(seen, device=self._device).expand(self._longest, self._longest)

    @cached_property
    def reach(self) -> tuple[int | None, int | None] | None:
        """How many tokens before and after its own a token sees, None: all; or None if it does not see neighbours."""
        own = torch.arange(self._longest, device=self._device)
        left = int(self._seen[-1].sum()) - 1  # the last token has the others to its left, the first one to its right
        right = int(self._seen[0].sum()) - 1
        distance = own[:, None] - own[None, :]
        if not torch.equal(self._seen, (distance <= left) & (distance >= -right)):
            return None
        most = self._longest - 1
        return None if left == most else left, None if right == most else right

    def of(self, length: int) -> tuple[torch.Tensor | None, bool]:
        """Return (mask [length, length] or None, whether it is causal) for a text of ``length`` tokens."""
        if self.reach in ((None, None), (None, 0)):
            return None, self.reach == (None, 0)
        return self._seen[:length, :length], False


class _Texts:
    """The texts that a forward pass computes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    @cached_property
    def packed(self) -> PackedTexts:
        """The texts, as the kernel takes them."""
        return PackedTexts.of(self.lengths)


_texts: ContextVar[_Texts] = ContextVar("texts")


@contextmanager
def packed_texts(lengths: Sequence[int]) -> Iterator[None]:
    """Let the models that this thread calls in the ``with`` see texts of these lengths, one after the other."""
    token = _texts.set(_Texts(lengths))
    try:
        yield
    finally:
        _texts.reset(token)


def register() -> None:
    """Make NAME known to transformers as an attention implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # slow to import
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def _mask(*, mask_function: MaskFunction, device: torch.device | str = "cpu", **_: Any) -> _Mask:
    return _Mask(mask_function, max(_texts.get().lengths), torch.device(device))


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
    head_dim, reach = query.shape[3], attention_mask.reach
    is_usual = query.device.type == "cpu" and head_dim == value.shape[3] and is_supported(query.dtype, head_dim)
    if is_usual and reach is not None:
        queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
        scale, (left, right) = head_dim**-0.5 if scaling is None else scaling, reach
        texts = _texts.get().packed
        return packed_attention(queries, keys, values, texts, left=left, right=right, scale=scale)[None], None
    return _attention_of_torch(query, key, value, attention_mask, scaling)[None], None


def _attention_of_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: _Mask, scaling: float | None
) -> torch.Tensor:
    """Compute what ``_attention`` does on any device, [num_tokens, num_heads, head_dim]."""
    shares_heads = key.shape[1] != query.shape[1]
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    start = 0
    for length in _texts.get().lengths:
        part = slice(start, start + length)
        text_mask, is_causal = mask.of(length)
        attended = F.scaled_dot_product_attention(
            query[:, :, part].contiguous(),  # at an aligned address: where a text lies in the batch must not matter
            key[:, :, part].contiguous(),
            value[:, :, part].contiguous(),
            attn_mask=text_mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=shares_heads,
        )
        output[part] = attended[0].transpose(0, 1)
        start += length
    return output

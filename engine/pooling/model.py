"""PooledModel: computes a batch of packed texts, and the result of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from engine.pooling.architectures import PooledArchitecture
from engine.pooling.attention import packed_texts
from engine.pooling.heads import Head
from engine.pooling.params import PoolingParams
from kernels.device_copy import to_device

__all__ = ["PooledModel", "Text"]


class Text(NamedTuple):
    """The tokens of one text, or of a pair, and what is wanted of them."""

    token_ids: Sequence[int]
    params: PoolingParams


class PooledModel:
    """A model with a head.

    Args:
        backbone: of transformers, with attention.py's attention implementation.
        head: maps the hidden states of a text to its result.
        architecture: how the model counts positions, and whether it knows token types.
        padding_id: of the padding token; None: the model has none.
    """

    def __init__(
        self, backbone: Any, head: Head, architecture: PooledArchitecture, padding_id: int | None = None
    ) -> None:
        self._backbone = backbone
        self._head = head
        self._architecture = architecture
        self._padding_id = 1 if padding_id is None else padding_id
        self.device: torch.device = backbone.device
        self.dtype: torch.dtype = backbone.dtype

    @property
    def dimensions(self) -> int:
        """Length of a result that is not cut."""
        return self._head.dimensions

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take."""
        return sum(weight.nbytes for weight in self._backbone.parameters())

    @torch.inference_mode()
    def compute(self, texts: Sequence[Text]) -> list[bytes]:
        """Return the result of each text as little-endian float32."""
        if len(texts) == 1 == len(texts[0].token_ids):
            # torch computes a slice of a single row in another way, with other bits, than slices of several rows.
            return self.compute([texts[0], texts[0]])[:1]
        lengths = [len(text.token_ids) for text in texts]
        with packed_texts(lengths):
            output = self._backbone(**self._inputs(texts))
        hidden: torch.Tensor = output[0][0]  # [num_tokens, hidden_size]
        parts = torch.split(hidden, lengths)
        results = [self._head(part, text.params) for part, text in zip(parts, texts, strict=True)]
        if self.device.type != "cpu":  # one copy from the device
            results = list(torch.split(torch.cat(results).cpu(), [len(result) for result in results]))
        return [result.numpy().astype("<f4", copy=False).tobytes() for result in results]

    def _inputs(self, texts: Sequence[Text]) -> dict[str, Any]:
        token_ids = [token_id for text in texts for token_id in text.token_ids]
        positions = [position for text in texts for position in self._positions(text)]
        ids = self._tensor(token_ids)
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": self._tensor(positions),
            # Of ones, or transformers would take a jump in the positions for the start of another sequence.
            "attention_mask": torch.ones_like(ids),
        }
        if self._architecture.has_token_types:
            inputs["token_type_ids"] = self._tensor([kind for text in texts for kind in _token_types(text)])
        if not self._architecture.is_encoder:
            inputs["use_cache"] = False
        return inputs

    def _positions(self, text: Text) -> Iterable[int]:
        if not self._architecture.counts_after_padding:
            return range(len(text.token_ids))
        padding = self._padding_id  # whose embedding is at its own position, and does not count
        count = accumulate(token_id != padding for token_id in text.token_ids)
        return (
            padding if token_id == padding else padding + number
            for token_id, number in zip(text.token_ids, count, strict=True)
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)[None]


def _token_types(text: Text) -> list[int]:
    num_tokens, num_first = len(text.token_ids), text.params.num_first
    if num_first is None:
        return [0] * num_tokens
    return [0] * num_first + [1] * (num_tokens - num_first)

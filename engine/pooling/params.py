"""PoolingParams: what a request wants of its text's hidden states, in the ingress, on the wire and in the engine."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["PoolingParams"]


class PoolingParams(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the text of one request becomes a vector, or a pair of texts its scores.

    Attributes:
        dimensions: length of the vector, which is cut and normalised again; None: the model's.
        normalize: whether the vector is divided by its length; None: as the model's files say.
        activation: whether scores pass the model's activation, such as a sigmoid; otherwise they are logits.
        num_first: tokens of the first text of a pair, whose token type is 0; that of the others is 1. None: all are 0.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool = True
    num_first: int | None = None

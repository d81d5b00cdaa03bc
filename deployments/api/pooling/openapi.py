"""What the OpenAPI document says about embeddings and scores."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from deployments.api.descriptions import ACCEPTS_BODY, Description
from deployments.api.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

__all__ = ["CLASSIFY", "EMBEDDINGS", "POOLING", "RERANK", "SCORE"]

_TAG = "embeddings and scores"
_STATUSES = ACCEPTS_BODY | {408}


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TextUsage(_Response):
    """Tokens of the texts."""

    prompt_tokens: int
    total_tokens: int


class TextResponse(_Response):
    """What the lists have."""

    id: str
    object: str
    created: int
    model: str
    usage: TextUsage


class Embedding(_Response):
    """A vector: numbers, or the base64 of little-endian float32."""

    index: int
    object: str
    embedding: list[float] | str


class EmbeddingResponse(TextResponse):
    """The vectors of all texts."""

    data: list[Embedding]


class PooledData(_Response):
    """A vector in vLLM's shape."""

    index: int
    object: str
    data: list[float] | str


class PoolingResponse(TextResponse):
    """The vectors of all texts."""

    data: list[PooledData]


class Score(_Response):
    """The score of a pair."""

    index: int
    object: str
    score: float


class ScoreResponse(TextResponse):
    """The scores of all pairs."""

    data: list[Score]


class RankedText(_Response):
    """A document."""

    text: str


class RankedDocument(_Response):
    """A document's place in the ranking."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankResponse(_Response):
    """The documents, the most relevant first."""

    id: str
    model: str
    usage: TextUsage
    results: list[RankedDocument]


class TextClass(_Response):
    """The probabilities of the labels for one text."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(TextResponse):
    """The classes of all texts."""

    data: list[TextClass]


EMBEDDINGS = Description(_TAG, (EmbeddingRequest,), (EmbeddingResponse,), statuses=_STATUSES)
POOLING = Description(_TAG, (PoolingRequest,), (PoolingResponse,), statuses=_STATUSES)
SCORE = Description(_TAG, (ScoreRequest,), (ScoreResponse,), statuses=_STATUSES)
RERANK = Description(_TAG, (RerankRequest,), (RerankResponse,), statuses=_STATUSES)
CLASSIFY = Description(_TAG, (ClassifyRequest,), (ClassifyResponse,), statuses=_STATUSES)

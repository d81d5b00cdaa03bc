"""The bodies of the endpoints for embeddings and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from deployments.api.body import JsonBody
from deployments.api.pooling.inputs import (
    DOCUMENTS_SCHEMA,
    INPUTS_SCHEMA,
    TEXTS_SCHEMA,
    TokenIds,
    as_documents,
    as_inputs,
    as_texts,
)
from engine.errors import RequestError

__all__ = [
    "ClassifyRequest",
    "EmbeddingRequest",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
    "TextRequest",
]

_Texts = Annotated[list[str], PlainValidator(as_texts), WithJsonSchema(TEXTS_SCHEMA)]
_Inputs = Annotated[list[str | TokenIds], PlainValidator(as_inputs), WithJsonSchema(INPUTS_SCHEMA)]
_Documents = Annotated[list[str], PlainValidator(as_documents), WithJsonSchema(DOCUMENTS_SCHEMA)]


class TextRequest(JsonBody):
    """What all of them have."""

    model: str | None = None
    priority: int = 0
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None

    def check(self) -> None:
        """Raise RequestError for truncation to nothing."""
        if self.truncate_prompt_tokens == 0:
            remedy = "give 1 or more, or -1 for the model's longest text"
            raise RequestError("is out of range", param="truncate_prompt_tokens", value=0, remedy=remedy)


class PoolingRequest(TextRequest):
    """Body of POST /pooling."""

    input: _Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    prompt_name: str | None = None


class EmbeddingRequest(PoolingRequest):
    """Body of POST /v1/embeddings."""


class ScoreRequest(TextRequest):
    """Body of POST /v1/score: one text with one or several others, or two equally long lists, pair by pair."""

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    instruction: str | None = None

    def check(self) -> None:
        """Raise RequestError if the texts do not pair."""
        super().check()
        first, second = self.names
        for name in (first, second):
            if getattr(self, name) is None:
                raise RequestError(f"is missing beside {first if name == second else second}", param=name)
        num_first, num_second = len(getattr(self, first)), self.num_pairs
        if num_first not in (1, num_second):
            raise RequestError(
                f"has {num_first} texts and {second} {num_second}", param=first, remedy="give one, or as many"
            )

    @property
    def names(self) -> tuple[str, str]:
        """The fields that hold the texts."""
        return ("queries", "documents") if self.queries is not None else ("text_1", "text_2")

    @property
    def num_pairs(self) -> int:
        """Number of scores that are wanted."""
        return len(getattr(self, self.names[1]))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs, in the order of the scores."""
        first, second = (getattr(self, name) for name in self.names)
        return [(first[0] if len(first) == 1 else first[index], text) for index, text in enumerate(second)]


class RerankRequest(TextRequest):
    """Body of POST /v1/rerank, as Cohere's and Jina's clients send it."""

    query: str
    documents: _Documents
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    instruction: str | None = None
    max_tokens_per_doc: Any = None
    max_chunks_per_doc: Any = None

    def check(self) -> None:
        """Raise RequestError for an empty list, or for Cohere's own ways to cut documents."""
        super().check()
        if not self.documents:
            raise RequestError("is empty", param="documents", value=[], remedy="give at least one")
        for name in ("max_tokens_per_doc", "max_chunks_per_doc"):
            if getattr(self, name) is not None:
                raise RequestError(
                    "is not offered", param=name, value=getattr(self, name), remedy="use truncate_prompt_tokens"
                )


class ClassifyRequest(TextRequest):
    """Body of POST /classify."""

    input: _Texts

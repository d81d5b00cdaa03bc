"""The bodies of the endpoints for embeddings and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.api.body import JsonBody
from engine.errors import RequestError

__all__ = [
    "ClassifyRequest",
    "Document",
    "EmbeddingRequest",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
    "TextRequest",
]

_TokenId = Annotated[int, Field(ge=0)]
_Texts = str | list[str]
_Inputs = str | list[str] | list[_TokenId] | list[list[_TokenId]]


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

    @property
    def texts(self) -> list[str | list[int]]:
        """The texts, or their token ids."""
        if isinstance(self.input, str):
            return [self.input]
        token_ids = [item for item in self.input if isinstance(item, int)]
        return [token_ids] if token_ids else [item for item in self.input if not isinstance(item, int)]


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
        num_first, num_second = len(self._list(first)), len(self._list(second))
        if num_first not in (1, num_second):
            raise RequestError(
                f"has {num_first} texts and {second} {num_second}", param=first, remedy="give one, or as many"
            )

    @property
    def names(self) -> tuple[str, str]:
        """The fields that hold the texts."""
        return ("queries", "documents") if self.queries is not None else ("text_1", "text_2")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs, in the order of the scores."""
        first, second = map(self._list, self.names)
        return [(first[0] if len(first) == 1 else first[index], text) for index, text in enumerate(second)]

    def _list(self, name: str) -> list[str]:
        value = getattr(self, name)
        return [value] if isinstance(value, str) else value or []


class Document(JsonBody):
    """A document as an object, as Cohere's and Jina's clients may send it."""

    text: str


class RerankRequest(TextRequest):
    """Body of POST /v1/rerank, as Cohere's and Jina's clients send it."""

    query: str
    documents: list[str | Document]
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

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ClassifyRequest(TextRequest):
    """Body of POST /classify."""

    input: _Texts

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input

"""PoolingApi: the endpoints for embeddings and scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import BodyReader
from deployments.api.pooling.encoding import floats, list_response, vectors
from deployments.api.pooling.openapi import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE
from deployments.api.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from deployments.api.pooling.serving import Pooled, PoolingServing
from deployments.api.pooling.texts import TextBuilder
from deployments.api.routes import ApiRoute
from deployments.errors import ApiError

__all__ = ["PoolingApi"]


class PoolingApi:
    """The endpoints of one ingress. Those that the server's task does not have answer with 400.

    Args:
        serving: computes what is asked for.
        bodies: reads the requests.
    """

    def __init__(self, serving: PoolingServing, bodies: BodyReader) -> None:
        self._serving = serving
        self._bodies = bodies

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/embeddings", "POST", self.embeddings, EMBEDDINGS),
            ApiRoute("/pooling", "POST", self.pooling, POOLING),
            *(ApiRoute(path, "POST", self.score, SCORE) for path in ("/score", "/v1/score")),
            *(ApiRoute(path, "POST", self.rerank, RERANK) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            ApiRoute("/classify", "POST", self.classify, CLASSIFY),
        ]

    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each text."""
        body = await self._bodies.read(EmbeddingRequest, request)
        return await self._vectors(body, "embd", "embedding", "embedding")

    async def pooling(self, request: Request) -> Response:
        """Return a vector for each text, in vLLM's shape."""
        body = await self._bodies.read(PoolingRequest, request)
        return await self._vectors(body, "pool", "pooling", "data")

    async def _vectors(self, body: PoolingRequest, prefix: str, kind: str, key: str) -> Response:
        builder = await self._serving.builder_for(body, "embed", len(body.input), "input")
        pooled = await self._serving.compute(await builder.embedding(body), body)
        as_base64 = body.encoding_format == "base64"
        items = vectors(pooled, kind=kind, key=key, as_base64=as_base64)
        return await list_response(pooled, self._head(pooled, prefix), items)

    async def score(self, request: Request) -> Response:
        """Return a score for each pair of texts, higher for a better match."""
        body = await self._bodies.read(ScoreRequest, request)
        builder = await self._serving.builder_for(body, "score", body.num_pairs, body.names[1])
        self._require_one_score(builder)
        texts = await builder.pairs(body.pairs, body, body.instruction, body.names)
        pooled = await self._serving.compute(texts, body)
        scores = _scores(pooled)
        data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
        return await list_response(pooled, self._head(pooled, "score"), data)

    async def rerank(self, request: Request) -> Response:
        """Return the documents with their relevance to the query, the most relevant first."""
        body = await self._bodies.read(RerankRequest, request)
        builder = await self._serving.builder_for(body, "score", len(body.documents), "documents")
        self._require_one_score(builder)
        pairs = [(body.query, text) for text in body.documents]
        texts = await builder.pairs(pairs, body, body.instruction, ("query", "documents"))
        pooled = await self._serving.compute(texts, body)
        scores = _scores(pooled)
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n]
        results = (
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
            for index in order
        )
        head = {"id": f"rerank-{pooled.response_id}", "model": self._serving.model, "usage": _usage(pooled)}
        return await list_response(pooled, head, results, "results")

    async def classify(self, request: Request) -> Response:
        """Return the probabilities of a classifier's labels for each text."""
        body = await self._bodies.read(ClassifyRequest, request)
        builder = await self._serving.builder_for(body, "score", len(body.input), "input")
        if builder.info.template is not None:
            raise ApiError(400, f"model '{self._serving.model}' has no classes; use POST /v1/rerank", param="model")
        pooled = await self._serving.compute(await builder.classes(body.input, body), body)
        classes = _classes(pooled, builder.info.labels)
        return await list_response(pooled, self._head(pooled, "classify"), classes)

    def _require_one_score(self, builder: TextBuilder) -> None:
        if builder.info.dimensions != 1:
            problem = f"model '{self._serving.model}' has {builder.info.dimensions} classes and no score of a pair"
            raise ApiError(400, f"{problem}; use POST /classify", param="model")

    def _head(self, pooled: Pooled, prefix: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{pooled.response_id}",
            "object": "list",
            "created": pooled.created,
            "model": self._serving.model,
            "usage": _usage(pooled),
        }


def _classes(pooled: Pooled, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the items of a list of classes."""
    for index, result in enumerate(pooled.results):
        probabilities = floats(result)
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        label = labels[best] if labels else None
        yield {"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)}


def _scores(pooled: Pooled) -> list[float]:
    return [floats(result)[0] for result in pooled.results]


def _usage(pooled: Pooled) -> dict[str, Any]:
    return {"prompt_tokens": pooled.num_tokens, "total_tokens": pooled.num_tokens}

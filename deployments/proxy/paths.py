"""The paths that the proxy, the ingress and the request log have to agree on. Imports nothing; see __init__.py.

An endpoint that makes an engine compute is an ApiRoute in its API's folder and a line of OPERATIONS.
"""

from __future__ import annotations

__all__ = ["HEALTH_PATHS", "OPERATIONS", "is_messages_path"]

# The paths whose POST requests make an engine compute, and OpenTelemetry's names for their operations. HAProxy aborts
# such a request when its client has gone; the ingress counts it as unfinished, logs it and traces it.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/invocations": "chat",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/classify": "classify",
}
HEALTH_PATHS = ("/health", "/ping")
_MESSAGES = "/v1/messages"


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to the Messages API, whose errors and headers differ from the OpenAI API's."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")

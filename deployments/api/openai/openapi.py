"""What the OpenAPI document says about chat, completions and models."""

from __future__ import annotations

from deployments.api.descriptions import GENERATES, Description, ServerSentEvents
from deployments.api.openai.protocol import ChatRequest, CompletionRequest
from deployments.api.openai.response_models import (
    ChatChunk,
    ChatResponse,
    CompletionChunk,
    CompletionResponse,
    ModelCard,
    ModelList,
)

__all__ = ["CHAT", "COMPLETIONS", "MODEL", "MODELS"]

_TAG = "OpenAI"

CHAT = Description(_TAG, (ChatRequest,), (ChatResponse,), ServerSentEvents((ChatChunk,)), GENERATES)
COMPLETIONS = Description(
    _TAG, (CompletionRequest,), (CompletionResponse,), ServerSentEvents((CompletionChunk,)), GENERATES
)
MODELS = Description(_TAG, responses=(ModelList,))
MODEL = Description(_TAG, responses=(ModelCard,), statuses=frozenset({404}))

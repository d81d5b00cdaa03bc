"""What the OpenAPI document says about the endpoints around generation."""

from __future__ import annotations

from deployments.api.descriptions import ACCEPTS_BODY, GENERATES, Description, ServerSentEvents
from deployments.api.openai.openapi import CHAT, COMPLETIONS
from deployments.api.utilities.server import LoadResponse, ServerInfoResponse
from deployments.api.utilities.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = ["DETOKENIZE", "INVOCATIONS", "LOAD", "SERVER_INFO", "TOKENIZE"]

_TAG = "utilities"

TOKENIZE = Description(_TAG, (TokenizeRequest, TokenizeChatRequest), (TokenizeResponse,), statuses=ACCEPTS_BODY | {501})
DETOKENIZE = Description(_TAG, (DetokenizeRequest,), (DetokenizeResponse,), statuses=ACCEPTS_BODY)
LOAD = Description(_TAG, responses=(LoadResponse,))
SERVER_INFO = Description(_TAG, responses=(ServerInfoResponse,))

assert CHAT.stream is not None
assert COMPLETIONS.stream is not None
INVOCATIONS = Description(
    _TAG,
    (*CHAT.bodies, *COMPLETIONS.bodies),
    (*CHAT.responses, *COMPLETIONS.responses),
    ServerSentEvents((*CHAT.stream.events, *COMPLETIONS.stream.events)),
    GENERATES,
)

"""POST /tokenize and POST /detokenize, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.body import BodyReader
from deployments.api.json_response import JsonResponse
from deployments.api.routes import ApiRoute
from deployments.api.serving import Serving
from deployments.api.utilities.openapi import DETOKENIZE, TOKENIZE
from deployments.api.utilities.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from engine.text.tokenizer import Tokenizer

__all__ = ["Tokenization"]


class Tokenization:
    """The endpoints of one ingress.

    Args:
        serving: knows the model's name and its tokenizer.
        bodies: reads them.
    """

    def __init__(self, serving: Serving, bodies: BodyReader) -> None:
        self._serving = serving
        self._bodies = bodies

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/tokenize", "POST", self.tokenize, TOKENIZE),
            ApiRoute("/detokenize", "POST", self.detokenize, DETOKENIZE),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation as the model would get it."""
        kinds: Mapping[str, type[TokenizeRequest | TokenizeChatRequest]]
        kinds = {"prompt": TokenizeRequest, "messages": TokenizeChatRequest}
        body = await self._bodies.read_by_field(kinds, request)
        builder = await self._serving.builder_for(body.model)
        if isinstance(body, TokenizeRequest):
            token_ids = await builder.text_token_ids(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            token_ids = await builder.chat_token_ids(body)

        def respond(tokenizer: Tokenizer) -> Response:
            names = tokenizer.token_names(token_ids) if body.return_token_strs else None
            counts = {"count": len(token_ids), "max_model_len": builder.max_total_tokens}
            return JsonResponse({**counts, "tokens": token_ids, "token_strs": names})

        response: Response = await builder.run_with_tokenizer(respond, cost=len(token_ids))
        return response

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        body = await self._bodies.read(DetokenizeRequest, request)
        builder = await self._serving.builder_for(body.model)
        return JsonResponse({"prompt": await builder.text_of(body.tokens, "tokens")})

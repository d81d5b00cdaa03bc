"""JSON as the API writes it: compact, with characters as they are."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

__all__ = ["JsonResponse", "encode_json"]

# One encoder for all responses: json.dumps makes a new one for each call with options.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_finite = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class JsonResponse(Response):
    """A response with a JSON body.

    Raises:
        ValueError: for NaN and infinities, which JSON does not have.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        # An unpaired surrogate, which JSON can escape and UTF-8 cannot hold, becomes its escape.
        return _encode_finite(content).encode(errors="backslashreplace")

"""RequestLog: one log line for each request that has ended, as text or as fields for Serve's JSON encoding.

Every value that a client has sent is quoted, so that it cannot end a line or forge a field. Prompts are logged only if
the configuration says so.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deployments.request_log.record import RequestRecord

if TYPE_CHECKING:
    from deployments.config import LoggingOptions
    from engine.text.tokenizer import Tokenizer

__all__ = ["RequestLog"]

logger = logging.getLogger("ray.serve")

Field = str | int | float | None
MAX_PARAM = 80  # characters of a parameter's name, which the client chooses
_PLAIN = re.compile(r"[\w.:/+@,-]+", re.ASCII)


class RequestLog:
    """Writes the log lines of one ingress.

    Args:
        options: whether requests and prompts are logged, and in which encoding.
    """

    def __init__(self, options: LoggingOptions) -> None:
        self._options = options

    def write(self, record: RequestRecord, trace_id: str = "") -> None:
        """Write the line of a request that has ended; ``trace_id`` is empty if the request is not traced."""
        if not self._options.requests:
            return
        fields = _fields(record, trace_id)
        if self._options.encoding == "JSON":
            # Serve gives every line its own ``replica``, here the ingress's.
            extra = {"engine_replica" if name == "replica" else name: value for name, value in fields.items()}
            logger.info("request finished", extra=extra)
        else:
            logger.info("request finished %s", " ".join(f"{name}={_shown(value)}" for name, value in fields.items()))

    def prompt(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str | None:
        """Return the start of a prompt, as long as the options allow; None if prompts are not logged."""
        if not (self._options.requests and self._options.prompts):
            return None
        limit = self._options.prompt_characters
        return tokenizer.decode(token_ids[:limit], skip_special_tokens=False)[:limit]


def _fields(record: RequestRecord, trace_id: str) -> dict[str, Field]:
    ttft_s = record.ttft_s
    fields: dict[str, Field] = {
        "id": record.request_id,
        "path": record.path,
        "replica": record.replica or None,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "ttft_ms": None if ttft_s is None else round(1e3 * ttft_s, 1),
        "e2e_ms": round(1e3 * record.e2e_s, 1),
        "reason": record.reason,
        "status": record.status,
        "migrations": record.num_migrations,
    }
    if record.error is not None and record.error.param:
        fields["param"] = record.error.param[:MAX_PARAM]
    if trace_id:
        fields["trace_id"] = trace_id
    if record.prompt is not None:
        fields["prompt"] = record.prompt
    return fields


def _shown(value: Field) -> str:
    """Return a value as one word or as a JSON string, in visible ASCII; ``-`` stands for None."""
    if value is None:
        return "-"
    if not isinstance(value, str) or _PLAIN.fullmatch(value):
        return str(value)
    return json.dumps(value).replace("\x7f", "\\u007f")

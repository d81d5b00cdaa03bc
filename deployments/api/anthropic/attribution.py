"""The attribution header of Claude Code, a line of its system prompt, is kept out of prompts.

It looks like ``x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;``, stands at the start
of the prompt and differs in every request, so that the prefix cache would serve none of the conversation.
"""

from __future__ import annotations

import re

from deployments.api.openai.protocol import ChatRequest

__all__ = ["without_billing_header"]

_NAME = "x-anthropic-billing-header:"
_LINE = re.compile(rf"^{_NAME}[^\n]*\n?", re.MULTILINE)


def without_billing_header(request: ChatRequest) -> ChatRequest:
    """Return the request without the lines of its system prompt that are a billing header."""
    system = request.messages[0]
    if system.role != "system" or not isinstance(system.content, str) or _NAME not in system.content:
        return request
    content = _LINE.sub("", system.content)
    kept = [system.model_copy(update={"content": content})] if content.strip() or len(request.messages) == 1 else []
    return request.model_copy(update={"messages": [*kept, *request.messages[1:]]})

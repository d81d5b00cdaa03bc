"""The model with tool calls and reasoning of the chat tests."""

from __future__ import annotations

from tests.deployments.api.openai.conftest import answers, parsed, parsed_path, tokenizer

__all__ = ["answers", "parsed", "parsed_path", "tokenizer"]

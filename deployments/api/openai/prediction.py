"""Prediction: the text that the client expects as the answer; the engine takes its draft tokens from there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Prediction"]

MAX_PARTS = 1_000


class PredictedText(BaseModel):
    """One part of a predicted text."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """OpenAI's ``prediction``. It makes an answer faster that repeats most of it, and changes no answer."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    type: Literal["content"]
    content: str | Annotated[list[PredictedText], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        """The text, of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

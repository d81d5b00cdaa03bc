"""ResponseRequest: the body of POST /v1/responses.

Fields that the chat API has under the same name are checked there. Fields that are known but not offered get 501,
others are ignored. This module does not know how a request is served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from deployments.api.openai.tools import Effort, check_size
from deployments.api.responses.input_items import Input
from deployments.api.responses.invalid_fields import invalid_field
from deployments.api.responses.tools import ToolChoice, Tools
from deployments.errors import ApiError
from engine.errors import RequestError, shown

__all__ = ["LOGPROBS", "ResponseRequest"]

LOGPROBS = "message.output_text.logprobs"
# All but the first are accepted and add nothing: there is no encrypted reasoning, and there are no built-in tools.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
# Known but not offered, with the values that change nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
MAX_METADATA = 16
Short = Annotated[str, Field(max_length=512)]
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


def _few_keys(value: object) -> object:
    """Reject a long map before each of its values is checked."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"it has {len(value)} keys; give at most {MAX_METADATA}")
    return value


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


class Reasoning(_Fields):
    """How much the model is to reason; a summary is never made."""

    effort: Effort | None = None


class TextFormat(_Fields):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: Annotated[str, Field(max_length=4096)] | None = None
    strict: bool | None = None

    def listed(self) -> dict[str, Any]:
        """Return the format as a response has it."""
        if self.type != "json_schema":
            return {"type": self.type}
        form = {"type": self.type, "name": self.name, "schema": self.schema_}
        return form | {"description": self.description, "strict": self.strict}


class TextOptions(_Fields):
    """The form of the answer's text; verbosity is for the model of OpenAI, and ignored."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(_Fields):
    """Body of POST /v1/responses."""

    _num_bytes: int = PrivateAttr(default=0)
    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    include: Annotated[list[Includable], Field(max_length=64, fail_fast=True)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Key, Value], Field(max_length=MAX_METADATA), BeforeValidator(_few_keys)] | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: Short | None = None
    service_tier: Short | None = None
    user: Short | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_wrong_field(cls, fields: Any, handler: Callable[[Any], Self]) -> Self:
        try:
            return handler(fields)
        except ValidationError as error:
            raise invalid_field(error, fields) from None

    def check(self) -> None:
        """Reject parameters that are not offered, and invalid combinations of fields that only this API has.

        Raises:
            RequestError: for an invalid combination.
            ApiError: 501 for a parameter that is known but not offered.
        """
        for name, neutral in NOT_OFFERED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise ApiError(501, f"{name}={shown(value)} is not offered; leave it out", param=name)
        if self.background and not self.is_stored:
            remedy = "leave out store: the response is retrieved by its id"
            raise RequestError("cannot be combined with store=False", param="background", value=True, remedy=remedy)
        if not self.input and self.previous_response_id is None:
            raise RequestError("is empty", param="input", remedy="give text or at least one item")
        form = self.text_format
        if form.type == "json_schema" and (form.schema_ is None or form.name is None):
            param = "text.format.schema" if form.schema_ is None else "text.format.name"
            raise RequestError("is missing", param=param, remedy="give it with the type json_schema")
        check_size("tools", [tool.parameters for tool in self.tools or ()])  # also of those that are not allowed
        _require_finite("tools", [tool.parameters for tool in self.tools or ()])
        _require_finite("text.format.schema", form.schema_)

    def set_num_bytes(self, num_bytes: int) -> None:
        """Set the length of the JSON."""
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Length of the JSON."""
        return self._num_bytes

    @property
    def text_format(self) -> TextFormat:
        """The form of the text."""
        form = self.text.format if self.text is not None else None
        return TextFormat(type="text") if form is None else form

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer's log-probabilities are wanted."""
        return LOGPROBS in (self.include or ())

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept, unless the server keeps none."""
        return self.store is not False


def _require_finite(param: str, schemas: object) -> None:
    """Reject numbers that JSON cannot write, since the response repeats the schemas."""
    try:
        json.dumps(schemas, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"cannot be written as JSON: {error}", param=param, remedy="use finite numbers") from None

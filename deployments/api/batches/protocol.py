"""The body of POST /v1/batches, and the objects that both APIs return."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.api.body import JsonBody

__all__ = [
    "MAX_TTL_S",
    "MIN_TTL_S",
    "BatchList",
    "BatchObject",
    "BatchRequest",
    "DeletedFile",
    "FileList",
    "FileObject",
]

MIN_TTL_S, MAX_TTL_S = 3600, 2_592_000  # an hour, 30 days

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class ExpiresAfter(BaseModel):
    """When the output is deleted."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S)


class BatchRequest(JsonBody):
    """Body of POST /v1/batches."""

    input_file_id: str = Field(max_length=128)
    endpoint: str = Field(max_length=128)
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileObject(_Object):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class DeletedFile(_Object):
    """The answer to a deletion."""

    id: str
    object: Literal["file"]
    deleted: bool


class _Page(_Object):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    """A page of files."""

    data: list[FileObject]


class BatchCounts(_Object):
    """The lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(_Object):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchList(_Page):
    """A page of batches."""

    data: list[BatchObject]

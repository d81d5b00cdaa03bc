"""What the OpenAPI document says about files and batches."""

from __future__ import annotations

from deployments.api.batches.protocol import BatchList, BatchObject, BatchRequest, DeletedFile, FileList, FileObject
from deployments.api.descriptions import Description, Query

__all__ = [
    "CANCEL_BATCH",
    "CREATE_BATCH",
    "DELETE_FILE",
    "FILE_CONTENT",
    "LIST_BATCHES",
    "LIST_FILES",
    "RETRIEVE_BATCH",
    "RETRIEVE_FILE",
    "UPLOAD_FILE",
]

_FILES, _BATCHES = "OpenAI files", "OpenAI batches"
_OFF = frozenset({501})  # without a directory
_FOUND = _OFF | {404}
_CREATES = _OFF | {400, 408, 413, 507}
_CURSOR = Query("after", {"type": "string"})
_ORDER = Query("order", {"enum": ["asc", "desc"]})


def _limit(most: int) -> Query:
    return Query("limit", {"type": "integer", "minimum": 1, "maximum": most})


UPLOAD_FILE = Description(
    _FILES,
    responses=(FileObject,),
    statuses=_CREATES,
    form={
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer"},
        },
        "required": ["file", "purpose"],
    },
)
LIST_FILES = Description(
    _FILES,
    responses=(FileList,),
    statuses=_OFF | {400},
    query=(_limit(10_000), _CURSOR, _ORDER, Query("purpose", {"type": "string"})),
)
RETRIEVE_FILE = Description(_FILES, responses=(FileObject,), statuses=_FOUND)
DELETE_FILE = Description(_FILES, responses=(DeletedFile,), statuses=_FOUND)
FILE_CONTENT = Description(_FILES, statuses=_FOUND, media_type="application/octet-stream")
CREATE_BATCH = Description(_BATCHES, (BatchRequest,), (BatchObject,), statuses=_CREATES | {404, 415})
LIST_BATCHES = Description(_BATCHES, responses=(BatchList,), statuses=_OFF | {400}, query=(_limit(100), _CURSOR))
RETRIEVE_BATCH = Description(_BATCHES, responses=(BatchObject,), statuses=_FOUND)
CANCEL_BATCH = Description(_BATCHES, responses=(BatchObject,), statuses=_FOUND | {400})

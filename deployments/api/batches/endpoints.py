"""Files and Batches: the endpoints of /v1/files and /v1/batches.

What belongs to another API key does not exist for a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from deployments.api.api_keys import owner_of
from deployments.api.batches.openapi import (
    CANCEL_BATCH,
    CREATE_BATCH,
    DELETE_FILE,
    FILE_CONTENT,
    LIST_BATCHES,
    LIST_FILES,
    RETRIEVE_BATCH,
    RETRIEVE_FILE,
    UPLOAD_FILE,
)
from deployments.api.batches.paging import page_of
from deployments.api.batches.protocol import MAX_TTL_S, MIN_TTL_S, BatchRequest
from deployments.api.batches.uploads import read_upload, storage_error
from deployments.api.body import BodyReader
from deployments.api.json_response import JsonResponse
from deployments.api.routes import ApiRoute
from deployments.batch.batch_store import State, TooManyBatchesError
from deployments.batch.file_store import StorageFullError, StoredFile
from deployments.batch.service import BatchService
from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["Batches", "Files"]

_WINDOW_S = 86_400
T = TypeVar("T")


class Files:
    """Uploads, lists, returns and deletes files.

    Args:
        service: keeps them; None without a directory.
        body_timeout_s: as ``limits.body_timeout_s``.
    """

    def __init__(self, service: BatchService | None, body_timeout_s: float) -> None:
        self._service = service
        self._body_timeout_s = body_timeout_s

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/files", "POST", self.upload, UPLOAD_FILE),
            ApiRoute("/v1/files", "GET", self.list, LIST_FILES),
            ApiRoute("/v1/files/{file_id}", "GET", self.retrieve, RETRIEVE_FILE),
            ApiRoute("/v1/files/{file_id}", "DELETE", self.delete, DELETE_FILE),
            ApiRoute("/v1/files/{file_id}/content", "GET", self.content, FILE_CONTENT),
        ]

    async def upload(self, request: Request) -> Response:
        """Keep a file."""
        service = _required(self._service)
        try:
            upload = await asyncio.to_thread(service.files.begin)
        except (OSError, StorageFullError) as error:
            raise storage_error(error) from None
        try:
            form = await read_upload(request, upload, service.options.max_file_bytes, self._body_timeout_s)
            if form.filename is None:
                raise ApiError(400, "file is missing; send it as a part of multipart/form-data", param="file")
            if (purpose := form.fields.get("purpose")) != "batch":
                problem = "is missing" if purpose is None else f"{shown(purpose)} is not supported"
                raise ApiError(400, f"purpose {problem}; give batch", param="purpose")
            keep = partial(service.files.keep, upload, form.filename, "batch")
            file = await asyncio.to_thread(keep, ttl_s=_ttl_s(form.fields), owner=owner_of(request.scope))
        except (OSError, StorageFullError) as error:
            raise storage_error(error) from None
        finally:
            await asyncio.to_thread(upload.discard)
        return JsonResponse(file.described())

    async def list(self, request: Request) -> Response:
        """List the files, the latest first."""
        files = await _stored(_required(self._service).files.all)
        owner, purpose = owner_of(request.scope), request.query_params.get("purpose")
        own = [file.described() for file in files if file.owner == owner and purpose in (None, file.purpose)]
        return JsonResponse(page_of(own, request.query_params, default=10_000, most=10_000))

    async def retrieve(self, file_id: str, request: Request) -> Response:
        """Describe a file."""
        return JsonResponse((await find_file(_required(self._service), file_id, request)).described())

    async def content(self, file_id: str, request: Request) -> Response:
        """Return the content of a file."""
        service = _required(self._service)
        file = await find_file(service, file_id, request)
        path = service.files.path(file)
        if not await asyncio.to_thread(path.is_file):
            raise _no_file(file_id)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def delete(self, file_id: str, request: Request) -> Response:
        """Delete a file. A batch that has begun with it is not disturbed."""
        service = _required(self._service)
        await find_file(service, file_id, request)
        await _stored(partial(service.files.delete, file_id))
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})


class Batches:
    """Creates, lists, returns and cancels batches.

    Args:
        service: keeps and runs them; None without a directory.
        bodies: reads those of requests.
        endpoints: that the lines of a batch may name.
    """

    def __init__(self, service: BatchService | None, bodies: BodyReader, endpoints: Sequence[str]) -> None:
        self._service = service
        self._bodies = bodies
        self._endpoints = endpoints

    def routes(self) -> list[ApiRoute]:
        """Return the endpoints."""
        return [
            ApiRoute("/v1/batches", "POST", self.create, CREATE_BATCH),
            ApiRoute("/v1/batches", "GET", self.list, LIST_BATCHES),
            ApiRoute("/v1/batches/{batch_id}", "GET", self.retrieve, RETRIEVE_BATCH),
            ApiRoute("/v1/batches/{batch_id}/cancel", "POST", self.cancel, CANCEL_BATCH),
        ]

    async def create(self, request: Request) -> Response:
        """Queue the requests of a file."""
        service = _required(self._service)
        body = await self._bodies.read(BatchRequest, request)
        if body.endpoint not in self._endpoints:
            problem = f"endpoint={shown(body.endpoint)} is not possible here; give {' or '.join(self._endpoints)}"
            raise ApiError(400, problem, param="endpoint", code="invalid_endpoint")
        file = await find_file(service, body.input_file_id, request, param="input_file_id")
        if file.purpose != "batch":
            problem = f"file {file.id} has the purpose {file.purpose}; give one that was uploaded with purpose=batch"
            raise ApiError(400, problem, param="input_file_id", code="invalid_purpose")
        create = partial(service.batches.create, service.files.path(file), file.id, body.endpoint, _WINDOW_S)
        try:
            state = await _stored(
                partial(
                    create,
                    completion_window=body.completion_window,
                    owner=file.owner,
                    metadata=body.metadata,
                    output_ttl_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
                )
            )
        except TooManyBatchesError as error:
            raise ApiError(400, f"{error}; wait until some have expired", code="too_many_batches") from None
        service.wake()
        return JsonResponse(state.described())

    async def list(self, request: Request) -> Response:
        """List the batches, the latest first."""
        states = await _stored(_required(self._service).batches.all)
        owner = owner_of(request.scope)
        own = [state.described() for state in states if state.batch.owner == owner]
        return JsonResponse(page_of(own, request.query_params, default=20, most=100))

    async def retrieve(self, batch_id: str, request: Request) -> Response:
        """Return a batch as it is now."""
        return JsonResponse((await self._find(batch_id, request)).described())

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """End a batch early; what is done is kept."""
        state = await self._find(batch_id, request)
        if state.status in ("completed", "failed", "expired"):
            problem = f"batch {batch_id} is {state.status} and cannot be cancelled"
            raise ApiError(400, problem, param="batch_id", code="batch_ended")
        service = _required(self._service)
        state = await _stored(partial(service.batches.cancel, state))
        service.wake()
        return JsonResponse(state.described())

    async def _find(self, batch_id: str, request: Request) -> State:
        state: State | None = await _stored(partial(_required(self._service).batches.get, batch_id))
        if state is None or state.batch.owner != owner_of(request.scope):
            raise ApiError(404, f"No batch found with id {shown(batch_id)}", param="batch_id", code="batch_not_found")
        return state


async def find_file(service: BatchService, file_id: str, request: Request, param: str = "id") -> StoredFile:
    """Return a file of the request's key.

    Raises:
        ApiError: 404 if there is none.
    """
    file: StoredFile | None = await _stored(partial(service.files.get, file_id))
    if file is None or file.owner != owner_of(request.scope):
        raise _no_file(file_id, param)
    return file


def _no_file(file_id: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {shown(file_id)}", param=param, code="file_not_found")


def _required(service: BatchService | None) -> BatchService:
    if service is None:
        problem = "files and batches need a directory, which all ingresses share; the operator sets batches.directory"
        raise ApiError(501, f"{problem} of serve_config.yaml", code="batches_off")
    return service


async def _stored(function: Callable[[], T]) -> T:
    """Call a method of a store in a thread."""
    try:
        return await asyncio.to_thread(function)
    except OSError as error:
        raise storage_error(error) from None


def _ttl_s(fields: Mapping[str, Any]) -> int | None:
    """Return the seconds of ``expires_after``; None without it."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        problem = f"expires_after[anchor]={shown(anchor)} is invalid; give created_at"
        raise ApiError(400, problem, param="expires_after")
    if seconds is None or not (seconds.isdecimal() and len(seconds) < 9 and MIN_TTL_S <= int(seconds) <= MAX_TTL_S):
        problem = f"expires_after[seconds]={shown(seconds)} is invalid; give a number from {MIN_TTL_S} to {MAX_TTL_S}"
        raise ApiError(400, problem, param="expires_after")
    return int(seconds)

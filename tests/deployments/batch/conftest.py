"""An ingress over fake engines with a directory for files and batches, and the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai._models import BaseModel
from openai.types import Batch, FileObject
from starlette.testclient import TestClient

from tests.deployments.conftest import OpenClient
from tests.waiting import HANG_S, until

ENDED = ("completed", "failed", "expired", "cancelled")
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


def line(custom_id: str, endpoint: str = COMPLETIONS, **body: Any) -> str:
    """Return a line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body or BODY})


@pytest.fixture
def web(open_client: OpenClient, tmp_path: Path) -> TestClient:
    """A client of an ingress."""
    return open_client(batches={"directory": str(tmp_path / "shared"), "max_line_bytes": 2**14, "max_lines": 200})


class ThroughTestClient(httpx.BaseTransport):
    """Sends the official client's requests to an application in this process."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._client.request(
            request.method, str(request.url), content=request.read(), headers=dict(request.headers)
        )
        headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
        return httpx.Response(answer.status_code, headers=headers, content=answer.content)


@pytest.fixture
def api(web: TestClient) -> openai.OpenAI:
    """The official client, which checks every answer."""
    return official(web)


def official(client: TestClient) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://testserver/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
        http_client=httpx.Client(transport=ThroughTestClient(client)),
    )


def check_fields(model: BaseModel) -> None:
    """Fail if an answer has fields that the client does not know, or values of other types."""
    assert not model.model_extra, model
    type(model).model_validate(json.loads(model.to_json(exclude_unset=False)), strict=True)


def upload(api: openai.OpenAI, content: str | bytes, name: str = "in.jsonl") -> FileObject:
    return api.files.create(file=(name, content.encode() if isinstance(content, str) else content), purpose="batch")


def run(api: openai.OpenAI, content: str | bytes, endpoint: Any = COMPLETIONS, **options: Any) -> Batch:
    """Run a batch to its end."""
    file = upload(api, content)
    batch = api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)
    check_fields(batch)
    return ended(api, batch.id)


def ended(api: openai.OpenAI, batch_id: str, hang_s: float = HANG_S) -> Batch:
    """Wait until a batch has ended."""

    def state() -> Batch | None:
        batch = api.batches.retrieve(batch_id)
        check_fields(batch)
        return batch if batch.status in ENDED else None

    batch = until(state, f"{batch_id} ends", hang_s=hang_s, details=lambda: api.batches.retrieve(batch_id))
    assert batch is not None
    return batch


def lines_of(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output file."""
    if file_id is None:
        return []
    return [json.loads(text) for text in api.files.content(file_id).text.splitlines()]


Open = Callable[..., TestClient]

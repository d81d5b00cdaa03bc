"""Batches with the official client: from the upload to the output, with bad lines, cancelled, failed."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from deployments.requests.background_gate import BACKGROUND_PRIORITY
from engine.outputs import EngineOutput, FinishReason
from tests.deployments.api.conftest import POOLED
from tests.deployments.batch.conftest import BODY, COMPLETIONS, ended, line, lines_of, official, run, upload
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import FakeDispatch, FakeEngines, output
from tests.waiting import until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def test_every_line_gets_the_answer_of_its_endpoint(api: openai.OpenAI, engines: FakeEngines) -> None:
    content = "\n".join(line(f"r{number}") for number in range(20))
    batch = run(api, content, metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.endpoint) == ("completed", {"a": "b"}, COMPLETIONS)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.error_file_id is None
    assert batch.usage is not None
    lines = lines_of(api, batch.output_file_id)
    assert [item["custom_id"] for item in lines] == [f"r{number}" for number in range(20)]
    direct = api.completions.create(model="tiny", **BODY).to_dict()
    for item in lines:
        assert item.keys() == {"id", "custom_id", "response", "error"}
        assert (item["error"], item["response"]["status_code"]) == (None, 200)
        body = item["response"]["body"]
        assert {name: body[name] for name in ("model", "choices", "usage")} == {
            name: direct[name] for name in ("model", "choices", "usage")
        }
    assert batch.model == "tiny"
    assert batch.usage.output_tokens == sum(item["response"]["body"]["usage"]["completion_tokens"] for item in lines)
    assert batch.usage.total_tokens == sum(item["response"]["body"]["usage"]["total_tokens"] for item in lines)
    assert {request.priority for request, _ in engines.calls} == {BACKGROUND_PRIORITY, 0}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "Hi", "max_output_tokens": 4})],
)
def test_the_other_endpoints(api: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    batch = run(api, line("a", endpoint, **body), endpoint)
    (item,) = lines_of(api, batch.output_file_id)
    assert item["response"]["status_code"] == 200
    assert item["response"]["body"]["object"] in ("chat.completion", "response")
    assert batch.usage is not None
    assert batch.usage.output_tokens == 3


def test_bad_lines_get_an_error_each_and_harm_no_other_line(api: openai.OpenAI) -> None:
    bad = {
        "{broken": "invalid_json_line",
        "[1]": "invalid_json_line",
        line("nan", prompt=float("nan")): "invalid_json_line",
        line("r0"): "duplicate_custom_id",
        line("other", "/v1/embeddings"): "invalid_url",
        line("get").replace("POST", "GET"): "invalid_method",
        line("long", prompt="x" * 2**14): "line_too_long",
        line("stream", prompt="x", stream=True): "invalid_body",
        json.dumps({"custom_id": "b", "method": "POST", "url": COMPLETIONS, "body": []}): "invalid_body",
        json.dumps({"custom_id": 5, "method": "POST", "url": COMPLETIONS, "body": BODY}): "invalid_custom_id",
    }
    content = "\n".join([line("r0"), "", *bad, line("r1"), "   ", line("refused", prompt="x", max_tokens=-1)])
    batch = run(api, content)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 13, "completed": 2, "failed": 11}
    assert [item["custom_id"] for item in lines_of(api, batch.output_file_id)] == ["r0", "r1"]
    *errors, refused = lines_of(api, batch.error_file_id)
    assert [item["error"]["code"] for item in errors] == list(bad.values())
    assert all(item["response"] is None for item in errors)
    assert all("line" in item["error"]["message"] for item in errors)
    assert errors[3]["custom_id"] == "r0"
    assert (refused["custom_id"], refused["error"]) == ("refused", None)
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_line_without_a_line_feed_and_a_bom(api: openai.OpenAI) -> None:
    batch = run(api, b"\xef\xbb\xbf" + line("a").encode() + b"\r\n" + line("b").encode())
    assert [item["custom_id"] for item in lines_of(api, batch.output_file_id)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "empty_file"), ("\n \n", "empty_file"), ("\n".join(map(line, map(str, range(201)))), "too_many_lines")],
)
def test_a_file_that_is_no_batch_fails(api: openai.OpenAI, content: str, code: str) -> None:
    batch = run(api, content)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == [code]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        api.batches.cancel(batch.id)


async def never(dispatch: FakeDispatch) -> None:
    await asyncio.Future()


def test_a_batch_is_cancelled(api: openai.OpenAI, engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDispatch, "wait", never)
    engines.scripts = [[None, output([70], "stop")]]
    file = upload(api, "\n".join(line(f"r{number}") for number in range(30)))
    batch = api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    api.files.delete(file.id)
    until(lambda: len(engines.dispatches) == 30, "all lines have been sent")
    cancelled = api.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    assert cancelled.cancelling_at is not None
    batch = ended(api, batch.id)
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    assert batch.cancelling_at == cancelled.cancelling_at
    assert api.batches.cancel(batch.id).status == "cancelled"


def test_an_ingress_that_stops_leaves_its_batches_to_another(
    open_client: OpenClient, engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (open_client(batches={"directory": str(tmp_path)}) for _ in range(2))
    scripts, engines.scripts = engines.scripts, [[None, output([70], "stop")]]
    monkeypatch.setattr(FakeDispatch, "wait", never)
    api = official(second)
    file = upload(api, "\n".join([*(line(f"r{number}") for number in range(5)), "{broken"]))
    batch = api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    until(lambda: len(engines.dispatches) == 5, "the first ingress has sent all lines")
    assert official(second).batches.retrieve(batch.id).status == "in_progress"
    engines.scripts = scripts
    first.__exit__(None, None, None)
    last = ended(api, batch.id)
    assert last.request_counts is not None
    assert last.request_counts.to_dict() == {"total": 6, "completed": 5, "failed": 1}
    assert [item["custom_id"] for item in lines_of(api, last.output_file_id)] == [f"r{number}" for number in range(5)]
    assert last.in_progress_at is not None
    assert len(engines.dispatches) == 10


def test_batches_are_listed_page_by_page(api: openai.OpenAI) -> None:
    ids = [run(api, line("a")).id for _ in range(3)]
    assert [batch.id for batch in api.batches.list()] == ids[::-1]
    first = api.batches.list(limit=2)
    assert (first.has_more, [batch.id for batch in first.data]) == (True, ids[:0:-1])
    assert [batch.id for batch in api.batches.list(limit=1)] == ids[::-1]
    assert api.batches.list(after=ids[0]).data == []


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": "/metrics"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": 5}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after"),
    ],
)
def test_a_batch_that_cannot_be_is_rejected(
    api: openai.OpenAI, web: TestClient, changed: dict[str, Any], status: int, param: str
) -> None:
    body = {"input_file_id": upload(api, line("a")).id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = web.post("/v1/batches", json=body | changed)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_output_is_no_input_and_expires_when_it_is_asked_to(api: openai.OpenAI, web: TestClient) -> None:
    batch = run(api, line("a"), output_expires_after={"anchor": "created_at", "seconds": 3600})
    output = api.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, (output.expires_at or 0) - output.created_at) == ("batch_output", 3600)
    body = {"input_file_id": output.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = web.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_purpose")


def test_embeddings(open_client: OpenClient, engines: FakeEngines, tmp_path: Path) -> None:
    engines.engine_info = POOLED
    vector = array("f", [0.5]).tobytes()
    engines.scripts = [[EngineOutput("id", 0, [], FinishReason.STOP, is_last=True, replica="r1", pooled=vector)]]
    api = official(open_client(task="embed", batches={"directory": str(tmp_path)}))
    lines = [line(f"r{number}", "/v1/embeddings", input=["a", "b"]) for number in range(3)]
    batch = run(api, "\n".join(lines), "/v1/embeddings")
    for item in lines_of(api, batch.output_file_id):
        assert [data["embedding"] for data in item["response"]["body"]["data"]] == [[0.5], [0.5]]
    assert batch.usage is not None
    assert batch.usage.input_tokens == batch.usage.total_tokens > 0
    file = upload(api, line("a"))
    with pytest.raises(openai.BadRequestError, match="give /v1/embeddings"):
        api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


@pytest.mark.parametrize("batch_id", ["batch_" + "0" * 32, "batch_none", "..", "x" * 300])
def test_unknown_batches(web: TestClient, batch_id: str) -> None:
    for answer in (web.get(f"/v1/batches/{batch_id}"), web.post(f"/v1/batches/{batch_id}/cancel")):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"]

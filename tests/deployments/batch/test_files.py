"""Files with the official client: kept, listed, expired, and what is rejected."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from deployments.batch.disk import Disk
from deployments.batch.file_store import FileStore
from deployments.batch.options import BatchOptions
from tests.deployments.batch.conftest import check_fields, line, official, upload
from tests.deployments.conftest import OpenClient

BOUNDARY = "b0undary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, value: str, filename: str | None = None) -> str:
    of_file = "" if filename is None else f'; filename="{filename}"'
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{of_file}\r\n\r\n{value}\r\n'


def form(*parts: str) -> bytes:
    return ("".join(parts) + f"--{BOUNDARY}--\r\n").encode()


PURPOSE, FILE = part("purpose", "batch"), part("file", "{}\n", "in.jsonl")


def test_a_file_is_kept_listed_read_and_deleted(api: openai.OpenAI) -> None:
    content = bytes(range(256)) * 5000  # several writes
    file = upload(api, content, "a.jsonl")
    check_fields(file)
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "a.jsonl", "batch", "processed")
    assert (file.expires_at or 0) - file.created_at == 2_592_000
    assert api.files.retrieve(file.id) == file
    assert api.files.content(file.id).read() == content
    assert [item.id for item in api.files.list()] == [file.id]
    assert api.files.list(purpose="batch_output").data == []
    deleted = api.files.delete(file.id)
    check_fields(deleted)
    assert deleted.deleted
    assert api.files.list().data == []
    for call in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            call(file.id)


def test_files_are_listed_page_by_page_in_either_order(api: openai.OpenAI) -> None:
    ids = [upload(api, line("a")).id for _ in range(5)]
    assert [file.id for file in api.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in api.files.list(limit=2, order="asc")] == ids
    assert [file.id for file in api.files.list(after=ids[3], order="desc").data] == ids[2::-1]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=10001", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=a", "after")],
)
def test_a_page_that_cannot_be_is_rejected(web: TestClient, query: str, param: str) -> None:
    answer = web.get(f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_fields_may_come_in_any_order_and_the_name_has_no_directories(web: TestClient) -> None:
    expiry = part("expires_after[anchor]", "created_at") + part("expires_after[seconds]", "3600")
    hostile = part("file", "{}\n", "../../etc/pass\x01wd")
    answer = web.post("/v1/files", content=form(hostile, expiry, PURPOSE), headers=FORM)
    assert answer.status_code == 200, answer.text
    file = answer.json()
    assert (file["filename"], file["bytes"], file["expires_at"] - file["created_at"]) == ("passwd", 3, 3600)


@pytest.mark.parametrize(
    ("content", "headers", "status", "what"),
    [
        (form(FILE), FORM, 400, "purpose is missing"),
        (form(PURPOSE), FORM, 400, "file is missing"),
        (form(part("purpose", "fine-tune"), FILE), FORM, 400, "'fine-tune' is not supported; give batch"),
        (form(PURPOSE, FILE, FILE), FORM, 400, "several files"),
        (form(PURPOSE, FILE)[:-8], FORM, 400, "it has no end"),
        (form(PURPOSE, part("", "x")), FORM, 400, "has no name"),
        (form(part("purpose", "x" * 2000), FILE), FORM, 400, "longer than 1024"),
        (form(*(part(f"a{number}", "x") for number in range(40))), FORM, 400, "more than 16 fields"),
        (form(PURPOSE, FILE, part("expires_after[seconds]", "3600")), FORM, 400, "expires_after[anchor]=None"),
        (
            form(PURPOSE, FILE, part("expires_after[anchor]", "created_at"), part("expires_after[seconds]", "5")),
            FORM,
            400,
            "expires_after[seconds]='5' is invalid",
        ),
        (b"no form at all", FORM, 400, "the form is invalid"),
        (b"", FORM, 400, "it has no end"),
        (b"{}", {"content-type": "application/json"}, 400, "send multipart/form-data"),
        (form(FILE), {"content-type": "multipart/form-data"}, 400, "with a boundary"),
        (form(FILE), {"content-type": f"multipart/form-data; boundary={'b' * 300}"}, 400, "the form is invalid"),
        (form(PURPOSE, part("file", "x" * 5000, "a")), FORM, 413, "exceeds 4096 bytes"),
        (form(PURPOSE, part("file", "x" * 100_000, "a")), FORM, 413, "exceeds 4096 bytes"),
    ],
)
def test_an_upload_that_cannot_be_leaves_nothing(
    open_client: OpenClient, tmp_path: Path, content: bytes, headers: dict[str, str], status: int, what: str
) -> None:
    web = open_client(batches={"directory": str(tmp_path), "max_file_bytes": 4096})
    answer = web.post("/v1/files", content=content, headers=headers)
    assert (answer.status_code, what in answer.json()["error"]["message"]) == (status, True), answer.text
    assert list((tmp_path / "files").iterdir()) == []


def test_all_files_together_are_bounded(open_client: OpenClient, tmp_path: Path) -> None:
    api = official(open_client(batches={"directory": str(tmp_path), "max_total_bytes": 4096}))
    first = upload(api, "x" * 3000)
    with pytest.raises(openai.BadRequestError, match="are left for files") as caught:
        upload(api, "x" * 3000)
    assert caught.value.code == "storage_limit_exceeded"
    api.files.delete(first.id)
    upload(api, "x" * 3000)


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EIO, 500)])
def test_a_disk_that_fails_is_an_error_that_says_so(
    web: TestClient, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def write(disk: Disk, descriptor: int, data: bytes) -> None:
        raise OSError(number, "it failed")

    monkeypatch.setattr(Disk, "write", write)
    answer = web.post("/v1/files", content=form(PURPOSE, FILE), headers=FORM)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert web.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    "file_id", ["file-" + "0" * 32, "none", "..", "%2e%2e%2fbatches", "x" * 300, "file-" + "g" * 32]
)
def test_unknown_files(web: TestClient, file_id: str) -> None:
    for answer in (
        web.get(f"/v1/files/{file_id}"),
        web.get(f"/v1/files/{file_id}/content"),
        web.delete(f"/v1/files/{file_id}"),
    ):
        assert answer.status_code == 404


def test_without_a_directory_the_answer_names_the_key(client: TestClient) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches")):
        answer = client.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 501
        assert "batches.directory" in answer.json()["error"]["message"]


def test_a_key_sees_its_own_files_and_batches_only(
    open_client: OpenClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"a-key-of-the-tests-{number}" for number in range(2)]
    monkeypatch.setenv("PAGODA_API_KEYS", ",".join(keys))
    web = open_client(batches={"directory": str(tmp_path)})
    own, others = (official(web).with_options(api_key=key) for key in keys)
    file = upload(own, line("a"))
    batch = own.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    calls: list[tuple[Any, dict[str, Any]]] = [
        (others.files.retrieve, {"file_id": file.id}),
        (others.files.content, {"file_id": file.id}),
        (others.files.delete, {"file_id": file.id}),
        (others.batches.retrieve, {"batch_id": batch.id}),
        (others.batches.cancel, {"batch_id": batch.id}),
        (
            others.batches.create,
            {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"},
        ),
    ]
    for call, arguments in calls:
        with pytest.raises(openai.NotFoundError):
            call(**arguments)
    assert (others.files.list().data, others.batches.list().data) == ([], [])
    assert [item.id for item in own.batches.list()] == [batch.id]
    assert keys[0].encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.json"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_has_expired_is_gone_and_is_swept(tmp_path: Path) -> None:
    clock = Clock()
    store = FileStore(Disk(), BatchOptions(tmp_path), lambda batch, file: file != "none", clock)
    kept, short = (_file(store, ttl_s=ttl_s) for ttl_s in (None, 3600.0))
    orphan = store.begin().path  # of a process that has died
    clock.now += 3600
    assert [file.id for file in store.all()] == [kept.id]
    assert store.get(short.id) is None
    store.sweep()
    assert not store.path(short).exists()
    assert orphan.exists()
    clock.now = orphan.stat().st_mtime + 86_401
    store.sweep()
    assert not orphan.exists()
    assert list(store.directory.iterdir()) == []  # the other has expired, too


def _file(store: FileStore, ttl_s: float | None) -> Any:
    upload = store.begin()
    upload.write(b"{}\n")
    return store.keep(upload, "a", "batch", ttl_s=ttl_s)

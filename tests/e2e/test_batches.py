"""Batches on real servers: with the official client, and with every process killed in the middle."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types import Batch

from tests.deployments.batch.conftest import check_fields, ended, line, lines_of, run
from tests.e2e.server import Server, alive, end_server, start_server
from tests.waiting import HANG_S, until

CHAT = "/v1/chat/completions"
BATCH_HANG_S = 240.0


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=server.key or "none",
        timeout=HANG_S,
        max_retries=2,
        _strict_response_validation=True,
    )


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def chat(number: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {number}: what is a KV cache?"}]
    return {"model": "pagoda-demo", "messages": messages, "max_tokens": 12, "temperature": 0} | options


def texts_of(api: openai.OpenAI, batch: Batch) -> dict[str, str]:
    """Return the answers by custom_id; each is there once."""
    lines = lines_of(api, batch.output_file_id)
    texts = {item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"] for item in lines}
    assert len(texts) == len(lines)
    return texts


def test_a_batch_has_the_answers_of_single_requests(api: openai.OpenAI) -> None:
    good = [line(f"r{number}", CHAT, **chat(number)) for number in range(12)]
    batch = run(api, "\n".join([*good, "{broken", good[0], line("other", "/v1/completions")]), CHAT)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 15, "completed": 12, "failed": 3}
    direct = {
        f"r{number}": api.chat.completions.create(**chat(number)).choices[0].message.content for number in range(12)
    }
    assert texts_of(api, batch) == direct
    errors = [item["error"]["code"] for item in lines_of(api, batch.error_file_id)]
    assert errors == ["invalid_json_line", "duplicate_custom_id", "invalid_url"]
    file = api.files.retrieve(batch.output_file_id or "")
    check_fields(file)
    assert file.bytes == len(api.files.content(file.id).read())


def test_a_running_batch_is_cancelled_and_keeps_what_is_done(api: openai.OpenAI, server: Server) -> None:
    endless = chat(0, max_tokens=1500, min_tokens=1500, ignore_eos=True)
    content = "\n".join(
        [line("short", CHAT, **chat(1)), *(line(f"r{number}", CHAT, **endless) for number in range(40))]
    )
    file = api.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def has_one() -> bool:
        counts = api.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 0

    until(has_one, "a line is done")
    api.batches.cancel(batch.id)
    last = ended(api, batch.id)
    assert last.status == "cancelled"
    assert "short" in texts_of(api, last)
    until(lambda: not any(server.usage().values()), "the engines are free", details=server.usage)


@pytest.mark.parametrize("num_bytes", [2**20 + 1, 2**22])
def test_a_file_that_is_too_large_is_refused_through_the_proxy(server: Server, num_bytes: int) -> None:
    """Each of its framings: with a length, and in chunks, where the answer comes before the end of the body."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    parts = [head, *[b"x" * 2**16] * (num_bytes // 2**16), b"x" * (num_bytes % 2**16), b"\r\n--b--\r\n"]
    for content in (b"".join(parts), iter(parts)):
        answer = httpx.post(f"{server.url}/v1/files", content=content, headers=headers, timeout=HANG_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")


NUM_LINES = 240
KILLED_LINES = "\n".join(
    line(
        f"r{number}",
        CHAT,
        **chat(number, max_tokens=60, ignore_eos=True, **({"temperature": 0.9, "seed": number} if number % 2 else {})),
    )
    for number in range(NUM_LINES)
)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_line_is_there_once_after_every_process_was_killed(tmp_path: Path, ray_dir: Path) -> None:
    directory = tmp_path / "batches"

    def change(args: dict[str, Any]) -> None:
        args["engine"]["dtype"] = "float32"
        args["engine"]["max_num_seqs"] = 8  # so that it takes long enough
        args["replicas"].update(
            num_engine_replicas=2, num_ingress_replicas=2, cpus_per_engine=0.1, cpus_per_ingress=0.1
        )
        args["batches"]["directory"] = str(directory)

    server = start_server(tmp_path, ray_dir, change)
    try:
        server.wait_until_ready()
        with client_of(server) as api:
            expected = texts_of(api, run(api, KILLED_LINES, CHAT))
            assert len(expected) == NUM_LINES
            file = api.files.create(file=("in.jsonl", KILLED_LINES.encode()), purpose="batch")
            batch = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            for kind in ("engine", "ingress"):
                for replica in server.pids(kind):
                    _kill_in_the_middle(server, directory, batch.id, kind, replica)
        _wait_for_results(directory, batch.id)
        for process in alive(server.processes()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait(timeout=HANG_S)
        assert not (directory / "batches" / batch.id / "end.json").exists()
        shutil.rmtree(ray_dir, ignore_errors=True)
        server = start_server(tmp_path, ray_dir, change)
        server.wait_until_ready()
        with client_of(server) as api:
            last = ended(api, batch.id)
            assert last.request_counts is not None
            assert last.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
            assert texts_of(api, last) == expected
    finally:
        end_server(server)


def _results(directory: Path, batch_id: str) -> int:
    return sum(path.stat().st_size for path in (directory / "batches" / batch_id).glob("results-*"))


def _wait_for_results(directory: Path, batch_id: str) -> None:
    """Wait until a running batch has another result."""
    before = _results(directory, batch_id)
    until(lambda: _results(directory, batch_id) > before, "the batch has another result", hang_s=BATCH_HANG_S)


def _kill_in_the_middle(server: Server, directory: Path, batch_id: str, kind: str, replica: str) -> None:
    _wait_for_results(directory, batch_id)
    assert not (directory / "batches" / batch_id / "end.json").exists()
    os.kill(server.pids(kind)[replica], signal.SIGKILL)

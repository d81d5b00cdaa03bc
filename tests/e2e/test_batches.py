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
BATCH_HANG_S = 600.0


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


def killed_lines(number: int, max_tokens: int) -> str:
    """Return an input of which every second line is sampled."""
    options: list[dict[str, Any]] = [{}, {"temperature": 0.9}]
    return "\n".join(
        line(f"r{index}", CHAT, **chat(index, max_tokens=max_tokens, ignore_eos=True, seed=index, **options[index % 2]))
        for index in range(number)
    )


# In the first case a line takes longer, in the second there are as many as in a night's file.
@pytest.mark.parametrize(
    ("num_lines", "max_tokens", "step"),
    [
        pytest.param(200, 60, 1, marks=pytest.mark.exhaustive("every process is killed and started again")),
        pytest.param(10_000, 12, 500, marks=pytest.mark.exhaustive("computes 20,000 lines")),
    ],
)
@pytest.mark.timeout(1800)
def test_every_line_is_there_once_after_every_process_was_killed(
    tmp_path: Path, ray_dir: Path, num_lines: int, max_tokens: int, step: int
) -> None:
    directory = tmp_path / "batches"
    content = killed_lines(num_lines, max_tokens)

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
            expected = _texts_of_all(api, _created(api, content).id, num_lines)
            batch = _created(api, content)
            results = Results(directory / "batches" / batch.id, step)
            for kind in ("engine", "ingress"):
                for replica in server.pids(kind):
                    results.wait_for_more()
                    os.kill(server.pids(kind)[replica], signal.SIGKILL)
        results.wait_for_more()
        for process in alive(server.processes()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait(timeout=HANG_S)
        assert not results.have_ended()
        shutil.rmtree(ray_dir, ignore_errors=True)
        server = start_server(tmp_path, ray_dir, change)
        server.wait_until_ready()
        with client_of(server) as api:
            assert _texts_of_all(api, batch.id, num_lines) == expected
    finally:
        end_server(server)


def _created(api: openai.OpenAI, content: str) -> Batch:
    file = api.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def _texts_of_all(api: openai.OpenAI, batch_id: str, num_lines: int) -> dict[str, str]:
    """Return the answers of a batch, once all its lines have one."""
    last = ended(api, batch_id, hang_s=BATCH_HANG_S)
    assert last.request_counts is not None
    assert last.request_counts.to_dict() == {"total": num_lines, "completed": num_lines, "failed": 0}
    texts = texts_of(api, last)
    assert len(texts) == num_lines
    return texts


class Results:
    """The journal of a running batch.

    Args:
        directory: of the batch.
        step: results between two kills.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._step = step

    def wait_for_more(self) -> None:
        """Wait until the batch has more results, and fail if it has ended then."""
        least = self._number() + self._step
        until(lambda: self._number() >= least or self.have_ended(), "the batch has more results", hang_s=BATCH_HANG_S)
        assert not self.have_ended()

    def have_ended(self) -> bool:
        """Whether the batch has ended."""
        return (self._directory / "end.json").exists()

    def _number(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self._directory.glob("results-*"))

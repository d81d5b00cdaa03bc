"""Batches without /v1/batches: against a server that fails at times, with an engine here, and interrupted anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.batch.journal import Record
from deployments.batch.offline.result_file import ResultFile
from deployments.batch.offline.run import OfflineBatch, run_batch
from engine.errors import ConfigError
from tests.deployments.batch.conftest import BODY, line
from tests.deployments.cli.terminal import run as run_pagoda
from tests.documents import ROOT
from tests.waiting import HANG_S, until

NUM_LINES = 12


class Handler(BaseHTTPRequestHandler):
    """Answers each request with its own prompt, but fails in a different way at each first attempt."""

    calls: Counter[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer(200, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        self.calls[prompt] += 1
        assert "priority" not in body
        if self.calls[prompt] == 1 and prompt in ("p1", "p2", "p3"):
            if prompt == "p1":
                self.close_connection = True
                return
            self._answer(503 if prompt == "p2" else 502, b"busy")
            return
        self._answer(400 if prompt == "p4" else 200, json.dumps({"model": "m", "text": prompt}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def other_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setattr("deployments.batch.answers._LAST_DELAY_S", 0.01)
    handler = type("Counting", (Handler,), {"calls": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def calls_of(server: ThreadingHTTPServer) -> Counter[str]:
    calls: Counter[str] = server.RequestHandlerClass.calls  # type: ignore[attr-defined]
    return calls


def batch_at(server: ThreadingHTTPServer, directory: Path) -> OfflineBatch:
    path = directory / "in.jsonl"
    path.write_text("\n".join([*(line(f"r{number}", prompt=f"p{number}") for number in range(NUM_LINES)), "{broken"]))
    return OfflineBatch(path, directory / "out.jsonl", url=f"http://127.0.0.1:{server.server_port}/v1/")


def results_of(path: Path) -> dict[str | None, Any]:
    """Return the answers by custom_id; each line has one result."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({item["id"] for item in lines}) == len(lines)
    return {item["custom_id"]: item["response"] and item["response"]["body"].get("text") for item in lines}


EXPECTED = {None: None} | {f"r{number}": f"p{number}" for number in range(NUM_LINES)}


async def test_every_line_is_answered_whatever_fails_on_the_way(
    other_server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    batch = batch_at(other_server, tmp_path)
    counts = await run_batch(batch)
    assert (counts.total, counts.completed, counts.failed) == (NUM_LINES + 1, NUM_LINES - 1, 2)
    assert results_of(batch.out) == EXPECTED
    assert {prompt for prompt, number in calls_of(other_server).items() if number > 1} == {"p1", "p2", "p3"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
async def test_a_run_continues_where_another_has_ended(
    other_server: ThreadingHTTPServer, tmp_path: Path, share: float
) -> None:
    batch = batch_at(other_server, tmp_path)
    await run_batch(batch)
    content = batch.out.read_bytes()
    batch.out.write_bytes(content[: int(share * len(content))])
    kept = batch.out.read_bytes().count(b"\n")
    calls_of(other_server).clear()
    counts = await run_batch(batch)
    assert results_of(batch.out) == EXPECTED
    assert (counts.done, counts.failed) == (NUM_LINES + 1, 2)
    assert len(calls_of(other_server)) in (NUM_LINES - kept, NUM_LINES - kept + 1)  # the broken line is not sent


def records(number: int) -> list[Record]:
    lines = [{"id": f"i{index}", "custom_id": "c", "response": None, "error": {}} for index in range(number)]
    return [Record(index, True, json.dumps(item).encode()) for index, item in enumerate(lines)]


@settings(max_examples=40)
@given(st.integers(0, 5), st.floats(0.0, 1.0))
def test_a_result_that_was_cut_off_is_removed(
    tmp_path_factory: pytest.TempPathFactory, number: int, share: float
) -> None:
    path = tmp_path_factory.mktemp("out") / "out.jsonl"
    ids = [f"i{index}" for index in range(5)]
    first = ResultFile(path, ids)
    first.append(records(number))
    first.close()
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    second = ResultFile(path, ids)
    whole = path.read_bytes()
    assert whole == content[: len(whole)]
    assert (len(second.done), second.num_errors) == (whole.count(b"\n"), whole.count(b"\n"))
    second.append([record for record in records(5) if f"i{record.index}" not in second.done])
    second.close()
    assert [json.loads(text)["id"] for text in path.read_text().splitlines()] == ids


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for content in ("precious\n", '{"id": "i9", "response": null}\n', "[]\n", '{"id": "i0"}\n'):
        path.write_text(content + "more")
        with pytest.raises(ConfigError, match="give another --out"):
            ResultFile(path, ["i0"])
        assert path.read_text() == content + "more"


def test_two_runs_do_not_write_the_same_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out.jsonl", [])
    with pytest.raises(ConfigError, match="another process writes"):
        ResultFile(tmp_path / "out.jsonl", [])
    first.close()
    ResultFile(tmp_path / "out.jsonl", []).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl", "--url", "http://127.0.0.1:9"], "'none.jsonl' cannot be read"),
        (["in.jsonl", "--url", "127.0.0.1:8000"], "is not an address of a server"),
        (["in.jsonl", "--url", "http://127.0.0.1:9"], "no server answers at 127.0.0.1:9"),
        (["in.jsonl", "--config", "none.yaml"], "--config='none.yaml' cannot be read"),
        (["in.jsonl", "--config", "in.jsonl"], "has no applications[0].args"),
        (["empty.jsonl", "--config", "none.yaml"], "has no lines"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "in.jsonl").write_text(line("a"))
    (tmp_path / "empty.jsonl").write_text("\n")
    code, text = run_pagoda("batch", *arguments, "--out", "out.jsonl", cwd=tmp_path)
    assert code == 1
    error = text.splitlines()[-1]
    assert error.startswith("pagoda: ")
    assert message in error


def demo_config(directory: Path) -> Path:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args = document["applications"][0]["args"]
    args["engine"] |= {"dtype": "float32", "max_num_seqs": 4}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def demo_batch(directory: Path, number: int) -> list[str]:
    """Write an input; return the arguments of the command."""
    path = directory / "in.jsonl"
    body = BODY | {"model": "pagoda-demo", "max_tokens": 40, "ignore_eos": True}
    lines = [line(f"r{index}", **body | {"prompt": f"Line {index} is"}) for index in range(number)]
    path.write_text("\n".join(lines))
    return [str(path), "--config", str(demo_config(directory))]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def texts_of(path: Path) -> dict[str, str]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    texts = {item["custom_id"]: item["response"]["body"]["choices"][0]["text"] for item in lines}
    assert len(texts) == len(lines)
    return texts


def test_an_engine_of_its_own_answers(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = demo_batch(tmp_path, 6)
    code, shown = run_pagoda("batch", *arguments, "--out", str(out))
    assert code == 0
    assert "6 lines are answered, 0 have failed" in shown
    assert texts_of(out).keys() == {f"r{index}" for index in range(6)}
    assert all(texts_of(out).values())
    before = out.read_bytes()
    assert run_pagoda("batch", *arguments, "--out", str(out))[0] == 0  # there is nothing to do, and no engine starts
    assert out.read_bytes() == before


@pytest.mark.exhaustive("five runs of the command")
def test_a_run_that_is_killed_is_continued(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "deployments.cli", "batch", *demo_batch(tmp_path, 120)]
    subprocess.run([*command, "--out", str(whole)], cwd=ROOT, check=True, timeout=HANG_S, env=os.environ)
    for _ in range(3):
        before = num_lines(out)
        with subprocess.Popen([*command, "--out", str(out)], cwd=ROOT) as process:
            until(lambda before=before: num_lines(out) > before, "there is another result")  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
        assert num_lines(out) < 120
    subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True, timeout=HANG_S)
    assert texts_of(out) == texts_of(whole)

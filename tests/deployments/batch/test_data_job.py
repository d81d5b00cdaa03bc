"""Batches as a Ray Data job: the answers of `pagoda batch`, in JSONL and Parquet, each once whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deployments.batch.conftest import BODY, line
from tests.deployments.batch.test_offline import demo_config
from tests.deployments.cli.terminal import run as run_pagoda
from tests.documents import ROOT
from tests.waiting import HANG_S, until

pa = pytest.importorskip("pyarrow", reason="of the extra `clients`")
pytest.importorskip("pandas", reason="of the extra `clients`")
import pyarrow.parquet as pq  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
MORE = pytest.mark.exhaustive("starts Ray Data for one line of text")
JOB_HANG_S = 300.0  # it starts Ray and engines
NUM_LINES = 480  # far more than are done before the engine, and then the job, are killed
BAD_LINES = ["{broken", line("r0"), line("other", "/v1/chat/completions"), '{"custom_id": "\\ud800"}']


def body(number: int) -> dict[str, Any]:
    options = {"model": "pagoda-demo", "prompt": f"Line {number} is", "max_tokens": 60, "ignore_eos": True}
    return BODY | options | ({"temperature": 0.9, "seed": number} if number % 2 else {})


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "deployments.batch", *map(str, arguments)]


def run_job(*arguments: object, code: int = 1) -> str:
    """Run a job to its end; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    job = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=JOB_HANG_S
    )
    assert job.returncode == code, job.stderr
    return job.stdout + job.stderr


def results_of(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of all results."""
    rows: list[dict[str, Any]] = []
    for path in sorted(directory.iterdir()):
        assert not path.name.startswith("_")
        if path.suffix == ".jsonl":
            rows += map(json.loads, path.read_text().splitlines())
        else:
            rows += [
                row | {name: row[name] and json.loads(row[name]) for name in ("response", "error")}
                for row in pq.read_table(path).to_pylist()
            ]
    return rows


def answers_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each answer by custom_id; each is there once."""
    answers = [row for row in rows if row["response"]]
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in answers}
    assert len(texts) == len(answers)
    return texts


def errors_of(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((row["error"]["code"], row["custom_id"] or "") for row in rows if row["error"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return demo_config(tmp_path)


@pytest.fixture
def expected(tmp_path: Path, config: Path) -> list[dict[str, Any]]:
    """The input ``in.jsonl``, and the results of `pagoda batch`."""
    lines = [line(f"r{number}", **body(number)) for number in range(NUM_LINES)]
    path, out = tmp_path / "in.jsonl", tmp_path / "batch.jsonl"
    path.write_text("\n".join([*lines[:20], *BAD_LINES, *lines[20:]]))
    code, shown = run_pagoda("batch", str(path), "--config", str(config), "--out", str(out))
    assert code == 1, shown
    return [json.loads(text) for text in out.read_text().splitlines()]


@pytest.mark.exhaustive("two runs of the job, and Ray is killed in the first")
def test_each_line_has_one_result_whatever_is_killed(
    tmp_path: Path, config: Path, expected: list[dict[str, Any]]
) -> None:
    out = tmp_path / "out"
    arguments = (tmp_path / "in.jsonl", "--out", out, "--config", config, "--engines", 2)

    def number_of_files() -> int:
        return len([path for path in out.glob("*.jsonl") if path.stem != "bad-lines"])

    with subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until(lambda: number_of_files() >= 1, "there is a result", hang_s=JOB_HANG_S)
        until(lambda: len(engines_of(process.pid)) == 2, "both engines run", hang_s=JOB_HANG_S)
        engines_of(process.pid)[0].kill()
        before = number_of_files()
        until(lambda: number_of_files() > before, "there is another result", hang_s=JOB_HANG_S)
        processes = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    for child in processes:  # Ray's agents would go on for a while
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(processes, timeout=HANG_S)
    assert 0 < len(answers_of(results_of_finished(out))) < NUM_LINES
    (out / "_unfinished.jsonl").write_text("half a li")
    shown = run_job(*arguments)
    assert f"{NUM_LINES} lines are answered, {len(BAD_LINES)} have failed" in shown
    rows = results_of(out)
    assert answers_of(rows) == answers_of(expected)
    assert [code for code, _ in errors_of(rows)] == [code for code, _ in errors_of(expected)]


def engines_of(job: int) -> list[psutil.Process]:
    """Return the processes of a job's engines."""
    engines = []
    for child in psutil.Process(job).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "EngineWorker" in " ".join(child.cmdline()):
                engines.append(child)
    return engines


def results_of_finished(directory: Path) -> list[dict[str, Any]]:
    for path in directory.glob("_*"):
        path.unlink()
    return results_of(directory)


@pytest.mark.exhaustive("a minute: CI runs the job on JSONL")
def test_parquet_and_several_files(tmp_path: Path, config: Path, expected: list[dict[str, Any]]) -> None:
    """Rows whose body is a struct, or JSON; without a method and an endpoint for chats, the default one."""
    source = tmp_path / "parquet"
    source.mkdir()
    ids = [f"r{number}" for number in range(40)]
    url = ["/v1/completions"] * len(ids)
    bodies = [body(number) for number in range(len(ids))]
    pq.write_table(pa.table({"custom_id": ids[:20], "url": url[:20], "body": bodies[:20]}), source / "a.parquet")
    texts = list(map(json.dumps, bodies[20:]))
    pq.write_table(pa.table({"custom_id": ids[20:], "url": url[20:], "body": texts}), source / "b.parquet")
    run_job(source, "--out", tmp_path / "out", "--config", config, "--engines", 1, code=0)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".parquet"}
    answers = answers_of(expected)
    assert answers_of(results_of(tmp_path / "out")) == {custom_id: answers[custom_id] for custom_id in ids}
    before = sorted((tmp_path / "out").iterdir())
    run_job(source, "--out", tmp_path / "out", "--config", config, "--engines", 1, code=0)
    assert sorted((tmp_path / "out").iterdir()) == before  # nothing was left to do
    other = tmp_path / "other.jsonl"
    other.write_text(line("unknown"))
    shown = run_job(other, "--out", tmp_path / "out", "--config", config)
    assert "is not one of this input; give another --out" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["none.jsonl"], "none.jsonl cannot be read", marks=MORE),
        (["in.jsonl", "--config", "none.yaml"], "--config='none.yaml' cannot be read"),
        pytest.param(["in.jsonl", "--engines", "100000"], "engines take 50000 of", marks=MORE),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(line("a"))
    given = [str(path) if item == "in.jsonl" else item for item in arguments]
    assert message in run_job(*given, "--out", tmp_path / "out").splitlines()[-1]

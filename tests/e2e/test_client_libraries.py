"""Client libraries against the real server: a chat, a stream, and a loop in which a tool is called.

The first call is forced, so that it is made and valid whatever the model is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import ROOT, Server
from tests.waiting import HANG_S

PROGRAMS = Path(__file__).parent / "clients"
OTHER_PYTHON = ROOT / "build" / "clients" / "bin" / "python"  # `make test-clients` makes it
NODE_OPENAI = "openai@6.49.0"

pytestmark = pytest.mark.exhaustive(
    "client libraries: an environment of 0.6 GB, and programs that take seconds to start"
)


@pytest.fixture(scope="module")
def answer(public_server: Server) -> str:
    """The answer to the question of every program, by plain HTTP."""
    body = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0}
    response = httpx.post(
        f"{public_server.url}/v1/chat/completions", json=body, headers=public_server.headers, timeout=HANG_S
    ).raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def run(server: Server, *command: Path | str, cwd: Path | None = None) -> dict[str, Any]:
    """Run a program with the server's URL; return what it prints."""
    program, *rest = command[1:]
    words = [str(word) for word in (command[0], program, f"{server.url}/v1", *rest)]
    quiet = {"OTEL_SDK_DISABLED": "true", "LANGSMITH_TRACING": "false", "PYTHONWARNINGS": "ignore"}
    quiet["OPENAI_API_KEY"] = server.key
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def check_turns(printed: dict[str, Any], answer: str) -> None:
    """Check what a program prints that has a chat, a stream and a loop with a tool."""
    assert printed["answer"] == answer
    assert printed["streamed"] == answer
    assert printed["cities"]
    assert {*printed["cities"]} <= {"Oslo", "Lima"}
    assert len(printed["final"].split()) > 3


@pytest.mark.parametrize(
    "program",
    [("with_langchain.py",), ("with_agents.py", "chat"), ("with_agents.py", "responses")],
    ids=" ".join,
)
def test_libraries_beside_the_server(public_server: Server, answer: str, program: tuple[str, ...]) -> None:
    module = {"with_langchain.py": "langchain_openai", "with_agents.py": "agents"}[program[0]]
    if importlib.util.find_spec(module) is None:
        pytest.skip("needs the extra `clients`: make test-all installs it")
    check_turns(run(public_server, sys.executable, PROGRAMS / program[0], *program[1:]), answer)


@pytest.mark.parametrize("program", ["with_litellm.py", "with_llama_index.py"])
def test_libraries_with_an_environment_of_their_own(public_server: Server, answer: str, program: str) -> None:
    check_turns(run(public_server, other_python(), PROGRAMS / program), answer)


@pytest.mark.parametrize("mode", ["tools", "json_schema"])
def test_instructor(public_server: Server, mode: str) -> None:
    (city,) = run(public_server, other_python(), PROGRAMS / "with_instructor.py", mode)["cities"]
    assert city in ("Oslo", "Lima")


def other_python() -> Path:
    """Return the interpreter of the other environment, or skip the test."""
    if not OTHER_PYTHON.exists():
        pytest.skip("needs an environment of its own: make test-clients")
    return OTHER_PYTHON


def test_openai_for_node(public_server: Server, answer: str, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs node and npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), NODE_OPENAI]
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    if installed.returncode:
        pytest.skip(f"npm cannot install {NODE_OPENAI}: {installed.stderr[-300:]}")
    program = shutil.copy(PROGRAMS / "with_openai.mjs", tmp_path)
    printed = run(public_server, node, program, cwd=tmp_path)
    check_turns(printed, answer)
    assert printed["response"] == answer

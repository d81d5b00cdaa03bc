"""The generated API tests of the official client libraries, from their source distributions, on the shared server.

They were made from the APIs' descriptions. What they ask for that the server refuses is in conformance/exceptions.yaml,
each with the reason. No part of them is kept here: make downloads them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.server import ROOT, Server

HERE = Path(__file__).parent / "conformance"
DOWNLOADED = ROOT / "build" / "conformance"
FILES = {  # of the endpoints that are served; of Anthropic's, models are not
    "openai": (
        "chat/test_completions.py",
        "test_completions.py",
        "test_models.py",
        "test_responses.py",
        "responses/test_input_items.py",
        "responses/test_input_tokens.py",
    ),
    "anthropic": ("test_messages.py",),
}
BASE_PATHS = {"openai": "/v1", "anthropic": ""}
EXCEPTIONS: dict[str, list[dict[str, str]]] = yaml.safe_load((HERE / "exceptions.yaml").read_text(encoding="utf-8"))

pytestmark = pytest.mark.exhaustive("hundreds of requests of two client libraries, whose sources make downloads")


def sources(library: str) -> Path:
    """Return the unpacked source distribution of a client library."""
    (pinned,) = re.findall(rf"^{library}==(\S+)", (HERE / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    path = DOWNLOADED / f"{library}-{pinned}"
    if not (path / "tests").is_dir():
        pytest.skip(f"{path.name} with its tests is not in build/conformance; `make test-exhaustive` downloads it")
    return path


def run(library: str, server: Server, results: Path) -> dict[str, str]:
    """Run the tests of a library; return for each what it did."""
    path = sources(library)
    environment = {
        "PYTHONPATH": f"{path / 'src'}{os.pathsep}{HERE}",
        "TEST_API_BASE_URL": server.url + BASE_PATHS[library],
        "CONFORMANCE_LIBRARY": library,
        "CONFORMANCE_MODEL": "pagoda-demo",
        "CONFORMANCE_RESULTS": str(results),
    }
    options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(path), "-p", "served_names", "-q", "--tb=line"]
    files = [str(path / "tests" / "api_resources" / name) for name in FILES[library]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert results.exists(), f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    document: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return document


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("library", FILES)
def test_generated_tests(library: str, server: Server, tmp_path: Path) -> None:
    report = run(library, server, tmp_path / "results.json")
    failed = {test: message for test, message in report.items() if message not in ("passed", "skipped")}
    unknown = dict(failed)
    for exception in EXCEPTIONS[library]:
        listed = [test for test in report if re.search(exception["tests"], test)]
        assert listed, f"no test is named {exception['tests']}"
        for test in listed:
            assert exception["says"] in report[test], f"{test} is listed as an exception"
            unknown.pop(test, None)
    assert not unknown
    assert list(report.values()).count("passed") >= len(failed)

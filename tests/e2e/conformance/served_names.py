"""A pytest plugin for the generated tests of client libraries, which expect a mock server that has every model and id.

Their requests name the served model instead, and a response that exists, and have the input that a server needs. What
each test did is written as JSON. It is not imported as a part of ``tests``, because those tests are in a package of
that name.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

MODEL = os.environ["CONFORMANCE_MODEL"]
BASE_URL = os.environ["TEST_API_BASE_URL"]
RESULTS = Path(os.environ["CONFORMANCE_RESULTS"])
LIBRARY = os.environ["CONFORMANCE_LIBRARY"]
_RESPONSE = re.compile(r"(?<=^/responses/)(?!input_tokens|compact)[^/?]+")
_TAKES_INPUT = re.compile(r"^/responses(/input_tokens)?(\?|$)")
_MODEL = re.compile(r"(?<=/models/)[^/?]+")

# Imported by the libraries' conftest.py for recorded requests, which none of the tests that run here uses.
for unused in ("inline_snapshot", "http_snapshot", "http_snapshot.httpx"):
    sys.modules.setdefault(unused, MagicMock())

results: dict[str, str] = {}  # of each test: passed, skipped, or the last line of its error


def new_response() -> str:
    """Return the id of a response that the server keeps and computes in the background."""
    body = json.dumps({"model": MODEL, "input": "Hi", "max_output_tokens": 1, "background": True}).encode()
    request = urllib.request.Request(f"{BASE_URL}/responses", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        response_id: str = json.load(answer)["id"]
    return response_id


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--http-record", action="store_true")  # of the same library for recorded requests


def pytest_configure() -> None:
    client = importlib.import_module(f"{LIBRARY}._base_client").BaseClient
    build = client._build_request

    def build_request(self: Any, options: Any, **rest: Any) -> Any:
        options.max_retries = 0
        if isinstance(options.json_data, dict) and "model" in options.json_data:
            options.json_data["model"] = MODEL
        if options.method == "post" and _TAKES_INPUT.search(options.url) and isinstance(options.json_data, dict | None):
            options.json_data = {"input": "Hi"} | (options.json_data or {})
        options.url = _MODEL.sub(MODEL, options.url)
        if _RESPONSE.search(options.url):
            options.url = _RESPONSE.sub(new_response(), options.url)
        return build(self, options, **rest)

    client._build_request = build_request


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        results[report.nodeid] = (crash.message if crash else report.outcome) if report.failed else report.outcome


def pytest_sessionfinish() -> None:
    RESULTS.write_text(json.dumps(results), encoding="utf-8")

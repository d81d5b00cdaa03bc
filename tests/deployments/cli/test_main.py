"""The command line itself: what it imports, its help, its exit codes, and its errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deployments.version import pagoda_version
from tests.deployments.cli.terminal import ROOT, run

HEAVY = {"torch", "ray", "transformers", "tokenizers", "numpy", "aiohttp", "yaml"}


@pytest.mark.parametrize("command", [["--help"], ["doctor", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["pagoda", *{command!r}]
from deployments.cli.main import main
try:
    main()
except SystemExit as exit:
    assert not exit.code
print("imported:", *sorted({HEAVY!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Usage: pagoda" in done.stdout
    assert done.stdout.rstrip().endswith("imported:")


def test_the_version() -> None:
    assert run("--version") == (0, f"pagoda {pagoda_version()}\n")


@pytest.mark.parametrize("arguments", [["doctr"], ["doctor", "--port", "70000"]], ids=" ".join)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert "Error" in text


def test_an_error_is_one_line_with_value_and_remedy() -> None:
    code, text = run("doctor", "ftp://x")
    assert code == 1
    assert text.splitlines() == [
        "pagoda: MODEL='ftp://x' does not exist; give the path of a checkpoint's directory or of a GGUF file, or `demo`"
    ]

""".ci/retry_failed.py on folders of tiny tests: what it runs again, its exit code, and what it reports as flaky."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RETRY_FAILED = Path(__file__).resolve().parents[2] / ".ci" / "retry_failed.py"
FAILS_ONCE = """
def test_fails_once(request):
    seen = request.path.with_suffix(".seen")
    failed_before = seen.exists()
    seen.touch()
    assert failed_before
"""
FAILS = "def test_fails(): assert False\n"
PASSES = "def test_passes(): pass\n"
NO_SERVER = """
import pytest

@pytest.fixture(scope="session")
def server(tmp_path_factory, request):
    seen = request.config.rootpath / "started"
    started_before = seen.exists()
    seen.touch()
    assert started_before

def test_uses_the_server(server): pass
"""


class Result:
    """What one call of the program left."""

    def __init__(self, folder: Path, **files: str) -> None:
        (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    long\n")
        for name, text in files.items():
            (folder / f"test_{name}.py").write_text(text)
        report = folder / "report"
        command = [sys.executable, str(RETRY_FAILED), str(report), "-m", "not long"]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take a second to import
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        self.code = result.returncode
        self.output = result.stdout
        self.report = report.read_text().splitlines() if report.exists() else []

    def num_runs(self) -> int:
        """Return how many times pytest ran."""
        return self.output.count("test session starts")


def flaky(test: str) -> str:
    """Return the line of the report about a test."""
    return f"flaky: {test} failed, then passed alone; see its log above"


def test_without_failures_pytest_runs_once(tmp_path: Path) -> None:
    result = Result(tmp_path, a=PASSES)
    assert (result.code, result.report, result.num_runs()) == (0, [], 1)


def test_a_test_that_passes_alone_is_flaky_and_the_run_green(tmp_path: Path) -> None:
    result = Result(tmp_path, a=FAILS_ONCE, b=PASSES)
    assert result.code == 0, result.output
    assert result.report == [flaky("test_a.py::test_fails_once")]
    assert result.num_runs() == 2
    assert "1 passed in" in result.output.splitlines()[-1]  # the second run has only the failed test


def test_a_test_that_fails_twice_is_red(tmp_path: Path) -> None:
    result = Result(tmp_path, a=FAILS, b=FAILS_ONCE)
    assert result.code == 1
    assert result.report == [flaky("test_b.py::test_fails_once")]
    assert result.output.splitlines()[-1] == "retry: test_a.py::test_fails failed twice"


def test_an_error_of_a_fixture_is_retried_with_a_new_fixture(tmp_path: Path) -> None:
    result = Result(tmp_path, a=NO_SERVER)
    assert (result.code, result.report) == (0, [flaky("test_a.py::test_uses_the_server")])


def test_an_id_with_parameters_is_run_again(tmp_path: Path) -> None:
    parametrized = "import pytest\n@pytest.mark.parametrize('x', ['a b::c', '[d]'])" + FAILS_ONCE.replace(
        "(request)", "(request, x)"
    ).replace('".seen"', 'f".{len(x)}"')
    result = Result(tmp_path, a=parametrized)
    assert (result.code, len(result.report), result.num_runs()) == (0, 2, 3), result.output


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"a": "import nothing_of_this_name\n", "b": FAILS_ONCE}, 2),
        ({"a": FAILS_ONCE, "b": "def test_crashes(): import os; os._exit(1)\n"}, 1),
        ({"a": "".join(FAILS.replace("test_", f"test_{number}_") for number in range(6))}, 1),
        ({"a": "import pytest\n@pytest.mark.long\ndef test_not_selected(): pass\n"}, 5),
    ],
    ids=["collection", "crash", "six-failures", "no-tests"],
)
def test_anything_else_is_red_at_once(tmp_path: Path, files: dict[str, str], code: int) -> None:
    result = Result(tmp_path, **files)
    assert (result.code, result.report, result.num_runs()) == (code, [], 1), result.output

"""Run pytest, then each failed test once more by itself: `python .ci/retry_failed.py REPORT [ARGUMENT OF PYTEST]...`.

A test that passes alone leaves the run green, and a line in the file REPORT names it as flaky. The run is red if a test
fails again, if more than five failed, and if pytest could not run them: an error in collection, a crash, an interrupt.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_RETRIED = 5
TESTS_FAILED = 1  # pytest's exit code if it ran to its end


def run_pytest(*arguments: str) -> int:
    """Return the exit code of pytest in a process of its own, so with fixtures of its own."""
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def run_and_list_failed(arguments: list[str]) -> tuple[int, list[str]]:
    """Return pytest's exit code and the ids of the failed tests, which its cache of failures names."""
    with tempfile.TemporaryDirectory() as cache:
        code = run_pytest("-o", f"cache_dir={cache}", *arguments)
        failures = Path(cache, "v", "cache", "lastfailed")
        return code, list(json.loads(failures.read_text(encoding="utf-8"))) if failures.exists() else []


def main(report: Path, arguments: list[str]) -> int:
    """Return 0 if every test passed, at first or alone."""
    code, failed = run_and_list_failed(arguments)
    if code != TESTS_FAILED or not 0 < len(failed) <= MAX_RETRIED:
        return code
    again = []
    for test in failed:
        print(f"\nretry: {test} failed; it runs once more by itself", flush=True)
        if run_pytest(test) != 0:
            again.append(test)
            continue
        with report.open("a", encoding="utf-8") as lines:
            lines.write(f"flaky: {test} failed, then passed alone; see its log above\n")
    for test in again:
        print(f"retry: {test} failed twice", flush=True)
    return TESTS_FAILED if again else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

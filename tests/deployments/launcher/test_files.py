"""Directories of servers that were killed are deleted at the next start, no others."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from deployments.launcher.files import MIN_AGE_S, temporary_directory


def _directory(path: Path, *, age_s: float = 2 * MIN_AGE_S) -> Path:
    path.mkdir()
    (path / "haproxy.cfg").write_text("")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_directories_that_no_process_uses_are_deleted(tmp_path: Path) -> None:
    left, new = _directory(tmp_path / "pg-left"), _directory(tmp_path / "pg-new", age_s=0)
    others, used = _directory(tmp_path / "others"), _directory(tmp_path / "pg-used")
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "TMPDIR": str(used)}) as process:
        try:
            with temporary_directory(tmp_path) as directory:
                assert Path(directory).name.startswith("pg-")
                assert {*tmp_path.iterdir()} == {new, others, used, Path(directory)}
        finally:
            process.kill()
    assert not left.exists()
    with temporary_directory(tmp_path):
        assert not used.exists()

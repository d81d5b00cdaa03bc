"""The directory of a server's sockets and temporary files, and the end of those that killed launchers have left."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["FOLDER", "temporary_directory"]

PREFIX = "pg-"
FOLDER = Path("/tmp")  # not TMPDIR: the path of a socket in it may not be longer than 107 characters
MIN_AGE_S = 60.0  # no process uses a directory that was just made


def temporary_directory(folder: Path = FOLDER) -> tempfile.TemporaryDirectory[str]:
    """Return a new directory, which the caller deletes; delete those of servers that no longer run.

    The processes of a server have its directory as TMPDIR; they may outlive a launcher that was killed.
    """
    for old in _unused(folder):
        shutil.rmtree(old, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True)


def _unused(folder: Path) -> list[Path]:
    candidates = [path for path in folder.glob(f"{PREFIX}*") if _is_ours_and_old(path)]
    if not candidates:
        return []
    used = set[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            used.add(process.environ().get("TMPDIR", ""))
    return [path for path in candidates if str(path) not in used]


def _is_ours_and_old(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and status.st_uid == os.geteuid() and time.time() - status.st_mtime > MIN_AGE_S

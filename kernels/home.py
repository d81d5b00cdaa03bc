"""home_for: the home directory, or a private directory for a process whose user has none that it can write.

A container may run under any user id: then HOME is unset, or names a directory of another user, and no entry of the
password database says more. Knows the file system only: no tensors, and no other module of ours.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

__all__ = ["home_for"]


def home_for(path: str) -> Path:
    """Return the user's home directory if ``path`` exists in it or can be made there, else a private directory.

    The private directory is ``pagoda-UID`` in TMPDIR, the same one for each process of the user.

    Args:
        path: of a file or directory, relative to the home directory.

    Raises:
        OSError: if no private directory can be made there either, or another user has made it.
    """
    try:
        home = Path.home()
    except RuntimeError:  # HOME is unset, and the user id has no entry in the password database
        return _private_directory()
    return home if _can_have(home / path) else _private_directory()


def _can_have(path: Path) -> bool:
    """Whether ``path`` exists, or the nearest directory above it that exists can be written."""
    if os.path.exists(path):  # Path.exists raises PermissionError
        return True
    nearest = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _private_directory() -> Path:
    user = os.geteuid()
    directory = Path(tempfile.gettempdir()) / f"pagoda-{user}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "it is not a directory of this user alone", str(directory))
    return directory

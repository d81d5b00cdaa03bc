"""provide_home: a HOME for the processes of the server under any user id: for Ray's token, and for caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from engine.errors import ConfigError
from kernels.home import home_for

__all__ = ["RAY_TOKEN", "provide_home"]

RAY_TOKEN = ".ray/auth_token"  # in the home directory; Ray makes it for its first cluster


def provide_home() -> None:
    """Set HOME of this process, and so of those that it starts, if the user has no home directory that Ray can use.

    Raises:
        ConfigError: if there is no other directory either.
    """
    try:
        home = home_for("" if _has_token(os.environ) else RAY_TOKEN)
    except OSError as error:
        raise ConfigError(
            f"user {os.geteuid()} has no home directory that can be written, and '{error.filename}' cannot replace it "
            f"({error.strerror}); set HOME to a directory of this user"
        ) from None
    if _home() != home:
        os.environ["HOME"] = str(home)
        print(f"pagoda: no home directory can be written; HOME={home} is used (`make status` needs it too)", flush=True)


def _has_token(environ: Mapping[str, str]) -> bool:
    """Whether Ray does not need the home directory for its token."""
    is_given = any(environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return is_given or environ.get("RAY_AUTH_MODE") == "disabled"


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None

"""The version of Pagoda."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["pagoda_version"]


def pagoda_version() -> str:
    """Return the installed version, or that of a checkout that is not installed."""
    try:
        return version("pagoda")
    except PackageNotFoundError:
        project = tomllib.loads(
            (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
        )["project"]
        return str(project["version"])

"""Which version of Pagoda this is."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["pagoda_version"]


def pagoda_version() -> str:
    """Return the installed version, or that of the checkout that runs without having been installed."""
    try:
        return version("pagoda")
    except PackageNotFoundError:
        project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
        return str(project["version"])

"""The version of Pagoda, and where the files are that come with it: in a checkout, or where pip has put them."""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

__all__ = ["SHIPPED_CONFIG", "checkout_root", "from_checkout", "pagoda_version"]

SHIPPED_CONFIG = "serve_config.yaml"


def pagoda_version() -> str:
    """Return the installed version, or that of a checkout that is not installed."""
    try:
        return version("pagoda")
    except PackageNotFoundError:
        project = tomllib.loads(
            (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
        )["project"]
        return str(project["version"])


def checkout_root() -> Path:
    """Return the directory of serve_config.yaml and the demo model, from which relative model paths start.

    It is the checkout, or where `pip install .` has copied these files.
    """
    root = Path(__file__).resolve().parent.parent
    return root if (root / SHIPPED_CONFIG).is_file() else _installed_root() or root


def from_checkout(path: str) -> Path:
    """Return a path of the configuration, with ~ expanded; a relative one starts at ``checkout_root``."""
    return checkout_root() / os.path.expanduser(path)  # Path.expanduser raises RuntimeError for an unknown user


def _installed_root() -> Path | None:
    with suppress(PackageNotFoundError):
        for file in distribution("pagoda").files or ():
            if file.name == SHIPPED_CONFIG:
                return Path(str(file.locate())).resolve().parent
    return None

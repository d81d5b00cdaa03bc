"""Which version of Pagoda this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["pagoda_version"]


def pagoda_version() -> str:
    """Return the installed version, or a word for a checkout that is not installed."""
    try:
        return version("pagoda")
    except PackageNotFoundError:  # run from its checkout
        return "0+unknown"

"""Install the rivals: ``python -m benchmarks.routing.rivals.install [NAME ...]``.

Each gets a virtual environment in ``build/rivals`` with the versions of requirements.txt, because their dependencies
exclude each other and ours.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import venv
from pathlib import Path

from benchmarks.routing.rivals.configurations import ENVIRONMENTS
from benchmarks.routing.rivals.errors import RivalMissingError

__all__ = ["main", "pinned", "python_of"]

FOLDER = Path("build/rivals")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def pinned(environment: str) -> list[str]:
    """Return what pip is to install into an environment, each as NAME==VERSION."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    by_name = {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}
    return [by_name[package] for package in ENVIRONMENTS[environment]]


def python_of(environment: str, folder: Path = FOLDER) -> str:
    """Return the Python of an environment.

    Raises:
        RivalMissingError: if it is not there, or has not the pinned versions.
    """
    python = folder.absolute() / environment / "bin" / "python"
    remedy = f"run: python -m benchmarks.routing.rivals.install {environment}"
    if not python.exists():
        raise RivalMissingError(f"{environment} is not installed in {folder}; {remedy}")
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    listed = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    installed = {_normalized(item) for item in listed}
    if missing := [item for item in pinned(environment) if _normalized(item) not in installed]:
        raise RivalMissingError(f"{folder / environment} does not have {', '.join(missing)}; {remedy}")
    return str(python)


def _normalized(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def main() -> None:
    """Create the environments that are not as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(ENVIRONMENTS)} (default: all)")
    names = parser.parse_args().names or list(ENVIRONMENTS)
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        parser.error(f"unknown: {', '.join(unknown)}; choose among {', '.join(ENVIRONMENTS)}")
    for name in names:
        try:
            python_of(name)
        except RivalMissingError:
            venv.create(FOLDER / name, with_pip=True, clear=True)
            python = FOLDER / name / "bin" / "python"
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pinned(name)], check=True)
        print(f"{name}: {', '.join(pinned(name))} in {FOLDER / name}", flush=True)


if __name__ == "__main__":
    main()

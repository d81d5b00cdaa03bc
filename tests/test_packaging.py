"""What `pip install .` copies: every file that the packages read, and those that a config's relative paths name."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackagePath
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments import version
from deployments.version import SHIPPED_CONFIG, checkout_root

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = ("deployments", "engine", "kernels")


def test_every_file_of_the_packages_is_installed() -> None:
    installed = {
        file
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()}
    assert {file for file in files if file.suffix not in (".py", ".pyc")} == installed


def test_the_shipped_config_and_its_model_are_installed_beside_each_other() -> None:
    data = SETUPTOOLS["data-files"]
    top = next(folder for folder, patterns in data.items() if SHIPPED_CONFIG in patterns)
    installed = {
        Path(folder).relative_to(top) / file.name
        for folder, patterns in data.items()
        for pattern in patterns
        for file in ROOT.glob(pattern)
    }
    model = {file.relative_to(ROOT) for file in (ROOT / "demo/model").iterdir() if file.is_file()}
    assert installed == {Path(SHIPPED_CONFIG), *model}


def test_relative_paths_start_where_an_installation_has_the_shipped_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site/deployments").mkdir(parents=True)
    file = PackagePath("../share/pagoda/serve_config.yaml")
    file.dist = SimpleNamespace(locate_file=lambda path: tmp_path / "site" / path)  # type: ignore[assignment]
    monkeypatch.setattr(version, "__file__", str(tmp_path / "site/deployments/version.py"))
    monkeypatch.setattr(version, "distribution", lambda name: SimpleNamespace(files=[PackagePath("x.py"), file]))
    assert checkout_root() == tmp_path / "share/pagoda"


def test_relative_paths_start_at_a_checkout() -> None:
    assert checkout_root() == ROOT

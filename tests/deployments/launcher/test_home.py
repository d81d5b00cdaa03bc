"""The launcher under a user id that has no home directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from deployments.config import AppConfig, checkout_root
from deployments.launch import main
from deployments.launcher import dashboard
from deployments.launcher.environment import environment
from deployments.launcher.home import RAY_TOKEN, provide_home
from deployments.proxy.limits import ProxyLimits
from engine.errors import ConfigError


@pytest.fixture(autouse=True)
def without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither HOME nor an entry in the password database; return where the private directory is to be."""
    monkeypatch.setenv("HOME", "")  # so that it is restored
    monkeypatch.delenv("HOME")
    expand = os.path.expanduser
    monkeypatch.setattr(os.path, "expanduser", lambda path: expand(path) if "HOME" in os.environ else path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"pagoda-{os.geteuid()}"


def test_the_processes_get_a_home(no_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    provide_home()
    assert environment(ProxyLimits(), tmp_path)["HOME"] == str(no_home) == str(Path.home())
    assert f"HOME={no_home} is used" in capsys.readouterr().out
    provide_home()
    assert capsys.readouterr().out == ""


def test_a_home_that_can_be_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    provide_home()
    assert os.environ["HOME"] == str(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("given", ["", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "disabled"])
def test_a_home_that_cannot_be_written_stays_only_if_ray_needs_none(
    no_home: Path, tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    if given:
        monkeypatch.setenv("RAY_AUTH_MODE" if given == "disabled" else given, given)
    provide_home()
    assert os.environ["HOME"] == str(home if given else no_home)


def test_the_launcher_says_in_one_line_that_there_is_no_directory(
    no_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_home.write_text("")
    with pytest.raises(ConfigError, match="has no home directory .* set HOME to a directory of this user"):
        provide_home()
    assert main([str(checkout_root() / "serve_config.yaml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(no_home) in line


@pytest.mark.usefixtures("no_home")
def test_paths_below_an_unknown_home_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="'~/m' is not a directory"):
        AppConfig.parse({"model": "~/m"}).require_model()
    monkeypatch.setenv("PAGODA_API_KEYS_FILE", "~nosuchuser/keys")
    assert main([str(checkout_root() / "serve_config.yaml")]) == 1
    assert "PAGODA_API_KEYS_FILE='~nosuchuser/keys' cannot be read" in capsys.readouterr().err


def test_rays_token_is_read_from_where_it_is(no_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dashboard._ray_token() == ""
    provide_home()
    (no_home / RAY_TOKEN).parent.mkdir()
    assert dashboard._ray_token() == ""
    (no_home / RAY_TOKEN).write_text("of the home\n")
    assert dashboard._ray_token() == "of the home"
    (tmp_path / "file").write_text("of a file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    assert dashboard._ray_token() == "of a file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert dashboard._ray_token() == "given"

"""home_for: a directory for any user id."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kernels.cpu.build import BuildError, cache_directory
from kernels.home import home_for


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the private directory is to be; nothing is there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp" / f"pagoda-{os.geteuid()}"


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor an entry of this user in the password database, as for any user id in a container."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory of another user, whatever user runs the test."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not home.is_relative_to(path) and access(path, mode))
    return home


def test_a_home_directory_that_can_be_written_is_taken(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "new" / "home"))
    assert home_for(".cache/pagoda") == tmp_path / "new" / "home"
    assert not private.exists()


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_directory_has_a_private_one(private: Path) -> None:
    assert home_for(".cache/pagoda") == home_for(".ray/auth_token") == private
    assert private.stat().st_mode & 0o777 == 0o700


def test_another_users_home_directory_serves_for_what_is_there(unwritable: Path, private: Path) -> None:
    assert home_for(".ray/auth_token") == private
    (unwritable / ".ray").mkdir()
    (unwritable / ".ray" / "auth_token").write_text("token")
    assert home_for(".ray/auth_token") == unwritable
    assert home_for(".cache/pagoda") == private


def test_a_file_where_a_directory_is_needed_makes_a_home_directory_unusable(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert home_for(".cache/pagoda") == private


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("kind", ["for others", "link", "file"])
def test_a_directory_that_others_may_have_made_is_refused(private: Path, tmp_path: Path, kind: str) -> None:
    if kind == "for others":
        private.mkdir()
        private.chmod(0o777)
    elif kind == "link":
        private.symlink_to(tmp_path)
    else:
        private.write_text("")
    with pytest.raises(OSError, match=private.name) as error:
        home_for(".ray/auth_token")
    if kind != "file":
        assert error.value.strerror == "it is not a directory of this user alone"


@pytest.mark.usefixtures("no_home")
def test_compiled_kernels_have_a_directory_without_a_home(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGODA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == private / ".cache" / "pagoda"
    private.chmod(0o755)
    with pytest.raises(BuildError, match="no cache directory .* set PAGODA_CACHE_DIR"):
        cache_directory()


def test_a_users_cache_directory_holds_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGODA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "pagoda"

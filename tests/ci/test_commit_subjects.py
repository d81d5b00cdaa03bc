""".ci/commit_subjects.py in small repositories: which commits it checks, and where it checks none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMMIT_SUBJECTS = Path(__file__).resolve().parents[2] / ".ci" / "commit_subjects.py"
FITS, TOO_LONG = "x" * 72, "y" * 73
Git = Callable[..., None]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """Git in an empty repository."""
    who = {f"GIT_{role}_{field}": "a@b" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}

    def run(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True)

    run("init")
    return run


def commit(git: Git, *subjects: str) -> None:
    """Make empty commits."""
    for subject in subjects:
        git("commit", "--allow-empty", "--message", f"{subject}\n\n{TOO_LONG * 2}")


def check(folder: Path, **environment: str) -> tuple[int, str]:
    """Return the exit code of the check in a folder, and what it prints."""
    command = [sys.executable, str(COMMIT_SUBJECTS)]
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout


def test_subjects_of_72_characters_fit(git: Git, tmp_path: Path) -> None:
    commit(git, "short", FITS)
    assert check(tmp_path) == (0, "commit subjects: 2 checked\n")


def test_a_longer_subject_is_named(git: Git, tmp_path: Path) -> None:
    commit(git, FITS, TOO_LONG, FITS)
    code, output = check(tmp_path)
    assert code == 1
    assert output.startswith("commit subject longer than 72 characters: ")
    assert output.endswith(f" {TOO_LONG}\n")


def test_commits_up_to_a_tag_are_left_alone(git: Git, tmp_path: Path) -> None:
    commit(git, TOO_LONG)
    git("tag", "v1")
    assert check(tmp_path) == (0, "commit subjects: none to check here\n")
    commit(git, "after the tag")
    assert check(tmp_path) == (0, "commit subjects: 1 checked\n")


def test_only_the_last_50_commits_are_checked(git: Git, tmp_path: Path) -> None:
    commit(git, TOO_LONG, *map(str, range(49)))
    assert check(tmp_path)[0] == 1
    commit(git, "the fiftieth")
    assert check(tmp_path) == (0, "commit subjects: 50 checked\n")


def test_a_merge_names_branches_and_may_be_longer(git: Git, tmp_path: Path) -> None:
    commit(git, "first")
    git("checkout", "-b", "side")
    commit(git, "second")
    git("checkout", "-")
    git("merge", "--no-ff", "--message", TOO_LONG, "side")
    assert check(tmp_path) == (0, "commit subjects: 2 checked\n")


def test_a_shallow_clone_is_checked_as_far_as_it_goes(git: Git, tmp_path: Path) -> None:
    commit(git, TOO_LONG, "second")
    git("clone", "--depth", "1", f"file://{tmp_path}", "shallow")
    assert check(tmp_path / "shallow") == (0, "commit subjects: 1 checked\n")


def test_without_git_or_commits_nothing_is_checked(tmp_path: Path, git: Git) -> None:
    none = "commit subjects: none to check here\n"
    assert check(tmp_path) == (0, none)
    assert check(tmp_path, GIT_DIR="nowhere") == (0, none)
    assert check(tmp_path, PATH="") == (0, "commit subjects: not checked, git is not installed\n")

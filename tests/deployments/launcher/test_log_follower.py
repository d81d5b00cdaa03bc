"""LogFollower: new lines of the replicas' log files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.launcher import log_follower
from deployments.launcher.log_follower import LogFollower
from tests.waiting import until


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_new_lines_of_replicas_are_shown(tmp_path: Path) -> None:
    old = tmp_path / "replica_a.log"
    shown: list[str] = []
    _append(old, "before\n")
    follower = LogFollower(tmp_path, shown.append)
    _append(old, "one\ntwo\n")
    _append(tmp_path / "replica_b.log", "a new replica\n")
    _append(tmp_path / "controller_1.log", "other\n")
    follower.show_new_lines()
    assert shown == ["one", "two", "a new replica"]
    follower.show_new_lines()
    assert len(shown) == 3


def test_an_incomplete_line_is_not_shown_yet(tmp_path: Path) -> None:
    path = tmp_path / "replica_a.log"
    shown: list[str] = []
    follower = LogFollower(tmp_path, shown.append)
    _append(path, "whole\nha")
    follower.show_new_lines()
    assert shown == ["whole"]
    _append(path, "lf\n")
    follower.show_new_lines()
    assert shown == ["whole", "half"]


def test_a_file_that_was_rotated_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "replica_a.log"
    shown: list[str] = []
    follower = LogFollower(tmp_path, shown.append)
    _append(path, "a long first line\n")
    follower.show_new_lines()
    path.rename(tmp_path / "replica_a.log.1")
    _append(path, "new\n")
    follower.show_new_lines()
    assert shown == ["a long first line", "new"]


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "MAX_READ", 16)
    path = tmp_path / "replica_a.log"
    shown: list[str] = []
    follower = LogFollower(tmp_path, shown.append)
    _append(path, "".join(f"line {number}\n" for number in range(50)))
    _append(path, "x" * 40 + "\nend\n")
    follower.show_new_lines()
    assert shown[:50] == [f"line {number}" for number in range(50)]
    assert "".join(shown[50:]) == "x" * 40 + "end"


def test_the_thread_follows_until_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "PERIOD_S", 0.01)
    path = tmp_path / "replica_a.log"
    shown: list[str] = []
    follower = LogFollower(tmp_path / "not yet there", shown.append)
    follower.start()
    follower.stop()
    follower = LogFollower(tmp_path, shown.append)
    follower.start()
    _append(path, "one\n")
    until(lambda: shown, "a line is shown", pause_s=0.01)
    _append(path, "last\n")
    follower.stop()
    assert shown == ["one", "last"]


def test_a_follower_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    """A signal may come between the two."""
    shown: list[str] = []
    LogFollower(tmp_path, shown.append).stop()
    assert shown == []

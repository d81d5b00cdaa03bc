"""The files of results: one line a record, and the same document when it is read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result_file import write_result

RECORD = {"name": "w16", "tokens_per_s": [113.92, 111.45, 115.72], "limit": None, "of": "an engine with a long name"}


@pytest.mark.parametrize("document", [{}, [], 1.5, {"a": []}, [RECORD] * 3, {"a": {"b": [RECORD, {}], "c": "ä"}}])
def test_what_was_written_is_read(tmp_path: Path, document: Any) -> None:
    write_result(tmp_path / "result.json", document)
    assert json.loads((tmp_path / "result.json").read_text()) == document


def test_numbers_as_keys_are_written_as_text(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", {16: [RECORD] * 2, 64: []})
    assert json.loads((tmp_path / "result.json").read_text()) == {"16": [RECORD] * 2, "64": []}


def test_a_record_is_on_one_line(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", {"cores": 2, "results": [RECORD, RECORD]})
    text = json.dumps(RECORD)
    assert (tmp_path / "result.json").read_text().splitlines() == [
        "{",
        ' "cores": 2,',
        ' "results": [',
        f"  {text},",
        f"  {text}",
        " ]",
        "}",
    ]


def test_a_long_list_of_numbers_is_on_one_line(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", list(range(1000)))
    assert len((tmp_path / "result.json").read_text().splitlines()) == 1

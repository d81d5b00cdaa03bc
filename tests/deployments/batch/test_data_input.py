"""What a Ray Data job reads: rows as JSON lines, and which lines still need an answer. Without Ray's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.batch.input_lines import custom_id_digest
from engine.errors import ConfigError
from tests.deployments.batch.conftest import BODY, COMPLETIONS, line

pa = pytest.importorskip("pyarrow", reason="of the extra `clients`")
pytest.importorskip("pandas", reason="of the extra `clients`")
import pyarrow.parquet as pq  # noqa: E402

from deployments.batch.data import survey as survey_module  # noqa: E402
from deployments.batch.data.job import Job, run_job  # noqa: E402
from deployments.batch.data.line_source import LINES, _rows  # noqa: E402
from deployments.batch.data.survey import _described, _select, _sorted, endpoint_of  # noqa: E402

DEEP = "[" * 100_000
DEFAULTS = {"method": "POST", "url": COMPLETIONS}


def table(*texts: str) -> Any:
    rows = range(1, len(texts) + 1)
    return pa.table([["in"] * len(texts), list(rows), [text.encode() for text in texts]], schema=LINES)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the JSON of each row of a Parquet file."""
    with path.open("rb") as file:
        return [json.loads(text or b"") for _, text in _rows(file, DEFAULTS)]


def test_a_job_has_no_engines_on_several_nodes() -> None:
    args = {"engine": {"tensor_parallel_size": 2}, "replicas": {"placement_strategy": "PACK"}, "model": "demo/model"}
    with pytest.raises(ConfigError, match=r"placement_strategy=PACK is for servers; leave it out of a job"):
        run_job(Job(("in.jsonl",), "out", args))


@pytest.mark.parametrize("end", [b"\x00", b"\x00\x00", b"\x01", b"\xff"])
def test_a_line_is_done_whatever_its_digest_ends_with(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module.ray, "get", lambda known: known)
    ids = (f"r{number}" for number in range(10**6))
    done = next(custom_id for custom_id in ids if custom_id_digest(custom_id).endswith(end))
    digests = {custom_id_digest(custom_id) for custom_id in (done, "another")}
    left = _select(table(line(done), line("not done")), COMPLETIONS, (_sorted(digests), set()))
    assert left["number"].to_pylist() == [2]


def test_nothing_is_done_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module.ray, "get", lambda known: known)
    lines = table(line("a"), line("b"), line("a"))
    assert _select(lines, COMPLETIONS, (_sorted(set()), {("in", 3)}))["number"].to_pylist() == [1, 2]


def test_nulls_are_left_out_of_structs_and_kept_in_json(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"custom_id": ["a", "b"], "body": [{"n": 1}, {"stop": "."}]}), path)
    assert [row["body"] for row in rows_of(path)] == [{"n": 1}, {"stop": "."}]
    bodies = [BODY | {"tool": {"default": None}}, BODY | {"enum": ["a", None]}]
    pq.write_table(pa.table({"custom_id": ["a", "b"], "body": list(map(json.dumps, bodies))}), path)
    assert [row["body"] for row in rows_of(path)] == bodies


def test_a_null_column_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    columns = {"custom_id": ["a", "b"], "url": [None, "/v1/embeddings"], "method": pa.nulls(2)}
    pq.write_table(pa.table(columns), path)
    assert rows_of(path) == [
        {"custom_id": "a", "method": "POST", "url": COMPLETIONS},
        {"custom_id": "b", "method": "POST", "url": "/v1/embeddings"},
    ]


def test_one_deeply_nested_row_does_not_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"custom_id": ["a", "b"], "body": [DEEP, json.dumps(BODY)]}), path)
    assert [row["body"] for row in rows_of(path)] == [DEEP, BODY]
    assert _described(table(DEEP))["custom_id"].to_pylist() == [""]

    class Lines:
        def take(self, number: int) -> list[dict[str, Any]]:
            return [{"text": DEEP}, {"text": line("a", "/v1/embeddings")}]

    monkeypatch.setattr(survey_module.ray.data, "read_datasource", lambda source: Lines())
    source: Any = None
    assert endpoint_of(source) == "/v1/embeddings"

"""Files of a tokenizer that do not list its tokens are a typed error, which says whose files they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.models.config.files.vocabulary import require_same_vocabulary

GOOD: dict[str, Any] = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "c", "id": 2}]}


def save(path: Path, tokenizer: dict[str, Any]) -> str:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"vocab": [1, 2]}},
        {"model": {"vocab": [[]]}},
        {"model": {"vocab": 7}},
        {"model": [1]},
        {"added_tokens": ["x"]},
        {"added_tokens": 3},
    ],
)
@pytest.mark.parametrize("is_draft", [False, True])
def test_damaged_files_are_named(tmp_path: Path, damage: dict[str, Any], is_draft: bool) -> None:
    paths = save(tmp_path / "good", GOOD), save(tmp_path / "damaged", GOOD | damage)
    require_same_vocabulary(paths[0], paths[0])
    with pytest.raises(ModelLoadError, match=r"files in '.*damaged' do not list its tokens .*; download them again"):
        require_same_vocabulary(*(paths if is_draft else reversed(paths)))

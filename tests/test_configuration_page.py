"""docs/configuration.md lists every key of serve_config.yaml's args with its default, every variable, nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from deployments.config import AppConfig
from engine.config import EngineConfig, SpeculativeConfig
from tests.documents import ROOT

PAGE = (ROOT / "docs/configuration.md").read_text()
REQUIRED = "required"
# Options of the engine that other keys set, or that only the offline API has; the page names them in a sentence.
NOT_OF_THE_FILE = {
    "served_model_name",
    "max_queued_requests",
    "max_queued_prefill_tokens",
    "skip_tokenizer_init",
}
OTHER_NAMES = {"PAGODA_STORE"}  # a constant of the C kernels


def documented(text: str) -> dict[str, Any]:
    """Return the keys in the tables with their defaults."""
    tables = text[text.index("## Model") : text.index("## Examples")]
    rows: list[tuple[str, str]] = re.findall(r"^\| `([\w.]+)` \| `?([^|`]+?)`? \|", tables, re.MULTILINE)
    assert len(rows) == len({key for key, _ in rows})
    return {key: REQUIRED if default == REQUIRED else yaml.safe_load(default) for key, default in rows}


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a pydantic model and of the models in it, with their defaults."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if name == "engine":
            yield from engine_keys()
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{name}.")
        else:
            yield prefix + name, REQUIRED if field.is_required() else field.default


def engine_keys() -> Iterator[tuple[str, Any]]:
    """Yield the engine's options that the file may set, with their defaults."""
    for field in dataclasses.fields(EngineConfig):
        if field.name != "model" and field.name not in NOT_OF_THE_FILE:
            yield f"engine.{field.name}", field.default


def test_the_page_lists_every_key_with_its_default_and_nothing_else() -> None:
    expected = dict(keys(AppConfig))
    assert len(expected) > 55
    assert documented(PAGE) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| `router.first_token_weight` | `15.0`", "| `router.first_token_weight` | `3.0`"),
        ("| `router.first_token_weight`", "| `router.first_token_weights`"),
        ("| `model` | required |", "| `model` | `null` |"),
        ("| `engine.seed` | `0`", "| `engine.sed` | `0`"),
    ],
)
def test_a_wrong_table_is_found(old: str, new: str) -> None:
    assert PAGE.count(old) == 1
    assert documented(PAGE.replace(old, new)) != dict(keys(AppConfig))


def test_the_rest_of_the_engines_options_is_named() -> None:
    for name in [*NOT_OF_THE_FILE, *(field.name for field in dataclasses.fields(SpeculativeConfig))]:
        assert f"`{name}`" in PAGE, name


def test_the_page_lists_the_variables_that_the_code_reads() -> None:
    code = [path for name in ("deployments", "engine", "kernels") for path in (ROOT / name).rglob("*")]
    sources = (path.read_text() for path in code if path.suffix in (".py", ".sh"))
    read = {name for text in sources for name in re.findall(r"\bPAGODA_[A-Z_]+\b", text)}
    assert read - OTHER_NAMES == set(re.findall(r"\bPAGODA_[A-Z_]+\b", PAGE))


def test_the_keys_that_the_shipped_file_leaves_commented_out_exist() -> None:
    shipped = (ROOT / "serve_config.yaml").read_text()
    named = set(re.findall(r"^ +# (\w+): ", shipped, re.MULTILINE))
    known = {key.rpartition(".")[2] for key in documented(PAGE)}
    assert len(named) > 8
    assert named <= known

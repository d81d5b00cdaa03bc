"""The EOS token of a tokenizer is the one that transformers reads, and ends answers by an option."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.errors import ModelLoadError
from engine.llm import LLM
from engine.models.config.files.generation_defaults import GenerationDefaults
from engine.models.config.files.tokenizer_eos import tokenizer_eos_id
from tests.engine.conftest import SavedModel
from tests.engine.text.tokenizers import KINDS, saved_kind
from tests.engine.tiny_tokenizers import save_tokenizer


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    fields = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_one_that_transformers_reads(kind: str) -> None:
    path = saved_kind(kind)
    assert tokenizer_eos_id(path) == AutoTokenizer.from_pretrained(path).eos_token_id == 2


def test_the_files_name_it_in_several_ways(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config, names, whole = (
        tmp_path / name for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
    )
    assert tokenizer_eos_id(tmp_path) == 2
    edit(config, eos_token={"content": "</s>", "special": True})
    assert tokenizer_eos_id(tmp_path) == 2
    edit(config, eos_token="<|im_end|>", added_tokens_decoder={"4": {"content": "<|im_end|>", "special": True}})
    assert tokenizer_eos_id(tmp_path) == 4
    edit(config, eos_token="the", added_tokens_decoder=None)
    assert tokenizer_eos_id(tmp_path) == AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("the")
    edit(config, eos_token=None)
    edit(names, eos_token="<s>")
    assert tokenizer_eos_id(tmp_path) == 1
    edit(whole, added_tokens=[], model={"type": "Unigram", "vocab": [["a", 0.0], ["<s>", 0.0]]})
    assert tokenizer_eos_id(tmp_path) == 1
    for broken in ({"vocab": [1, 2]}, {"vocab": [[]]}, [], {"vocab": {"<s>": "1"}}):
        edit(whole, model=broken)
        assert tokenizer_eos_id(tmp_path) is None
    edit(config, added_tokens_decoder={"1" * 5000: {"content": "<s>"}})
    assert tokenizer_eos_id(tmp_path) is None
    edit(config, added_tokens_decoder=None)
    edit(whole, added_tokens=[{"id": -7, "content": "<s>"}])
    assert tokenizer_eos_id(tmp_path) is None
    edit(names, eos_token=None)
    assert tokenizer_eos_id(tmp_path) is None
    config.write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json' is not valid JSON"):
        tokenizer_eos_id(tmp_path)


@pytest.mark.parametrize(("eos", "expected"), [("<|endoftext|>", 2), ("<|im_end|>", 4), ("<|other|>", None)])
def test_without_a_tokenizer_json_older_files_have_the_id(tmp_path: Path, eos: str, expected: int | None) -> None:
    edit(tmp_path / "vocab.json", **{"a": 0, "b": 1, "<|endoftext|>": 2, "ab": 3})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    edit(tmp_path / "added_tokens.json", **{"<|im_end|>": 4})
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token=eos)
    assert tokenizer_eos_id(tmp_path) == expected
    if expected is not None:
        assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == expected


@pytest.mark.parametrize(
    ("of_config", "vocab_size", "expected"), [(5, 300, (5, 2)), ([2, 5], 300, (2, 5)), ([1, 0], 2, (1, 0))]
)
def test_it_comes_after_those_of_the_config_if_it_has_a_logit(
    tmp_path: Path, of_config: Any, vocab_size: int, expected: tuple[int, ...]
) -> None:
    save_tokenizer(tmp_path)
    config = SimpleNamespace(eos_token_id=of_config, vocab_size=vocab_size)
    assert GenerationDefaults.load(tmp_path, config, with_tokenizer=True).eos_token_ids == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (5, 2)),
        ({"stop_at_tokenizer_eos": False}, (5,)),
        ({"skip_tokenizer_init": True}, (5,)),
    ],
)
def test_an_option_decides_whether_it_ends_answers(
    qwen3: SavedModel, tmp_path: Path, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    path = Path(shutil.copytree(qwen3.path, tmp_path / "checkpoint"))
    save_tokenizer(path)
    edit(path / "generation_config.json", eos_token_id=5)
    llm = LLM(str(path), device="cpu", num_blocks=8, max_model_len=64, **options)
    assert llm.engine.info.eos_token_ids == expected

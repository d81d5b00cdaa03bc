"""Kimi's tokenizer gives the tokens of tiktoken with Kimi's pattern, and runs no code of the checkpoint."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.text.tiktoken_tokenizer import is_kimi_tokenizer, kimi_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.gguf_originals import KIMI_SPLIT

MERGED = [
    "th",
    "he",
    "the",
    " t",
    " the",
    "in",
    "ing",
    "中",
    "文",
    "中文",
    "er",
    "12",
    "123",
    "  ",
    "\n\n",
    "'s",
    "é",
    " 中",
]
SPECIAL = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<|tool_call_begin|>": False}
TEXTS = ["中文English混合", "the thing's 12345 中文 ing", "北京市 Pascal fooBar", " a\n\n  b\t c", "it'S é́ 한국어 🎉"]


def ranks() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)]
    for text in MERGED:
        word = text.encode()
        tokens += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in tokens]
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def kimi_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tokenizer with Kimi's files."""
    path = tmp_path_factory.mktemp("kimi")
    known = ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in known.items()]
    (path / "tiktoken.model").write_text("".join(lines))
    added = {len(known) + i: {"content": name, "special": special} for i, (name, special) in enumerate(SPECIAL.items())}
    config: dict[str, Any] = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    config |= {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "tokenization_kimi.py").write_text("raise SystemExit('this must not run')")
    (path / "config.json").write_text('{"model_type": "kimi_k2"}')
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    return path


@pytest.fixture(scope="module")
def oracle() -> tiktoken.Encoding:
    return tiktoken.Encoding("kimi", pat_str=KIMI_SPLIT, mergeable_ranks=ranks(), special_tokens={})


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_tokens_of_tiktoken(kimi_path: Path, oracle: tiktoken.Encoding, text: str) -> None:
    tokenizer = Tokenizer(kimi_path)
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(st.sampled_from("theing'sSr 123中文混é\n\t .🎉한"), max_size=30))
@settings(max_examples=40, deadline=None)
def test_random_texts_have_them_too(kimi_path: Path, oracle: tiktoken.Encoding, text: str) -> None:
    assert kimi_tokenizer(kimi_path).encode(text) == oracle.encode(text)


def test_special_tokens_and_the_chat_template(kimi_path: Path) -> None:
    tokenizer = Tokenizer(kimi_path)
    first = len(ranks())
    assert tokenizer.single_token_id("<|tool_call_begin|>") == first + 3
    assert tokenizer.special_token_ids(SPECIAL) == {first, first + 1, first + 2}
    assert tokenizer.chat_template.encode([{"role": "user", "content": "the"}])[-1] == first + 2
    assert len(tokenizer) == first + 4


def test_a_changed_file_is_read_again(kimi_path: Path, tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "tiktoken.model"):
        (tmp_path / name).write_bytes((kimi_path / name).read_bytes())
    assert len(Tokenizer(tmp_path).encode("the")) == 1
    lines = (tmp_path / "tiktoken.model").read_text().splitlines()
    lines[ranks()[b"the"]] = f"{base64.b64encode(b'xyz').decode()} {ranks()[b'the']}"
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    assert len(Tokenizer(tmp_path).encode("the")) > 1


def test_other_tokenizers_with_code_are_refused(kimi_path: Path, tmp_path: Path) -> None:
    assert is_kimi_tokenizer(kimi_path)
    config = json.loads((kimi_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "OtherTokenizer"}
    (tmp_path / "tiktoken.model").write_bytes((kimi_path / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert not is_kimi_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match="custom code"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert not is_kimi_tokenizer(tmp_path)

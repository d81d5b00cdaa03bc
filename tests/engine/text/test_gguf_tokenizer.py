"""A tokenizer out of a GGUF file equals the original: on 2,000 texts of every kind, its special tokens and template."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.errors import ModelLoadError
from engine.text.gguf_words import WORDS
from engine.text.tokenizer import Tokenizer
from tests.engine.text.gguf_originals import KINDS, TEXTS, save_original, write_gguf_of

NUM_TEXTS = 2000
PIECES = [
    *" \n\t\r\u00a0", "  ", "   ", "\n\n", "\r\n", " \n ", *"aBcDéñßÄ日本русا٣½²", "e\u0301", "A\u030a", "ﬁ", "🚀",
    "😶‍🌫️",
    "'s", "'LL", "'Ve", "don't", "1", "22", "333", "4444", "1234567", "3.14", "a/b//c", "//\n", "--", "!?", "<", ">",
    "▁",
    "the", " the", "The", "THE", "HTTPServer", " tokens", "\x00", "[PAD701]", "<0x41>", "<s>", "</s>", "<unk>", "<bos>",
    "<|turn>", "<turn|>", "<|tool_call>",
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|user|>", "<|end|>  ", "<think>", "<tool_call>", "[INST]",
]  # fmt: skip


def make_texts() -> list[str]:
    rng = random.Random(0)
    texts = ["", *TEXTS]
    while len(texts) < NUM_TEXTS:
        texts.append("".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 24))))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_original(tmp_path: Path, kind: str) -> None:
    original = save_original(kind, tmp_path)
    write_gguf_of(kind, original, path := tmp_path / "model.gguf")
    ours, theirs = Tokenizer(path), Tokenizer(tmp_path)
    assert ours.special_ids == theirs.special_ids
    assert len(ours) == len(theirs)
    assert ours.chat_template.source == theirs.chat_template.source != ""
    texts = make_texts()
    encoded = [ours.encode(text) for text in texts]
    assert encoded == [theirs.encode(text) for text in texts]
    for text, token_ids in list(zip(texts, encoded, strict=True))[::10]:
        for options in ({"add_special_tokens": False}, {"split_special_tokens": True}):
            assert ours.encode(text, **options) == theirs.encode(text, **options), text
        for skips in (True, False):
            decoded = [tokenizer.decode(token_ids, skip_special_tokens=skips) for tokenizer in (ours, theirs)]
            assert decoded[0] == decoded[1]
    ids = range(len(theirs))
    assert ours.token_names(ids) == theirs.token_names(ids)
    messages = [{"role": "user", "content": "hello <s> you"}]
    assert ours.chat_template.encode(messages) == theirs.chat_template.encode(messages)


def test_words_are_split_as_transformers_splits_them() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    shared = WORDS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(shared) >= 10
    assert {name: WORDS[name] for name in shared} == {name: (GGUF_PRE_TOKENIZER_SPLITS[name],) for name in shared}


def write(path: Path, **metadata: Any) -> Path:
    """Write a small byte-level tokenizer with some metadata replaced, or without it (None)."""
    base: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<s>"],
        "token_type": [1, 1, 1, 3],
        "merges": ["a b"],
        "bos_token_id": 3,
    }
    writer = gguf.GGUFWriter(path, "llama")
    add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array, bool: writer.add_bool}
    for key, value in (base | metadata).items():
        if value is not None:
            add[type(value)](key if "." in key else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_the_small_one_is_good(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path / "a.gguf", add_bos_token=True, add_eos_token=True, eos_token_id=3))
    assert tokenizer.encode("abb") == [3, 2, 1, 3]
    assert not tokenizer.chat_template.exists


SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "pre": None,
    "tokens": ["<unk>", "<s>", "</s>", "▁a", "▁", "a"],
    "token_type": [2, 3, 3, 1, 1, 1],
    "merges": None,
    "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "bos_token_id": 1,
}


def test_older_files_do_not_say_that_a_text_begins_with_bos(tmp_path: Path) -> None:
    assert Tokenizer(write(tmp_path / "spm.gguf", **SENTENCEPIECE)).encode("a") == [1, 3]
    assert Tokenizer(write(tmp_path / "no.gguf", **SENTENCEPIECE, add_bos_token=False)).encode("a") == [3]
    assert Tokenizer(write(tmp_path / "llama3.gguf", pre="llama-bpe")).encode("ab") == [3, 2]
    assert Tokenizer(write(tmp_path / "qwen2.gguf", pre="qwen2")).encode("ab") == [2]


def test_a_control_token_never_results_from_pieces_of_text(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<", "s>", "▁", "▁<", "s", ">", "a"]
    metadata = SENTENCEPIECE | {"tokens": tokens, "token_type": [2, 3, 3, *[1] * 7], "scores": [0.0] * 10}
    tokenizer = Tokenizer(write(tmp_path / "a.gguf", **metadata, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("<s>") == [1]
    assert tokenizer.encode("<s>", split_special_tokens=True) == [3, 4]


def test_named_templates(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["default", "tool_use"]}
    templates |= {"tokenizer.chat_template.default": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    tokenizer = Tokenizer(write(tmp_path / "a.gguf", **templates))
    assert tokenizer.chat_template.source.split("\n") in (["plain", "with tools"], ["with tools", "plain"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"model": None, "tokens": None, "token_type": None, "bos_token_id": None}, "it has no tokens"),
    "another kind": ({"model": "rwkv"}, "of the kind 'rwkv'; gpt2, llama and gemma4"),
    "unknown words": ({"pre": "own"}, r"not known \(tokenizer.ggml.pre='own'\)"),
    "no words": ({"pre": None}, r"not known \(tokenizer.ggml.pre=None\)"),
    "numbers": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of str"),
    "too few kinds": ({"token_type": [1, 1]}, "token_type has 2 elements for 4 tokens"),
    "half a merge": ({"merges": ["ab"]}, "the merge 'ab' is not two tokens"),
    "a merge of others": ({"merges": ["a c"]}, "its merges do not fit its tokens"),
    "an id": ({"bos_token_id": 4}, "bos_token_id=4 is not the id of one of its 4 tokens"),
    "a template": ({"tokenizer.chat_template": 5}, "its chat template is not a text"),
    "a number of templates": ({"tokenizer.chat_templates": 5}, "chat_templates=5 is not a list of names"),
    "a flag": ({"add_bos_token": "yes"}, "add_bos_token='yes' is not true or false"),
    "no scores": ({"model": "llama", "unknown_token_id": 3}, "its tokens have no scores"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    metadata, message = REFUSED[case]
    path = write(tmp_path / "a.gguf", **metadata)
    with pytest.raises(ModelLoadError, match=message) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
    assert "give a Hugging Face checkpoint's directory" in str(caught.value)

"""Mistral's tokenizer gives the tokens of tiktoken with the file's pattern, and says which template fits."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError, RequestError
from engine.text.tokenizer import Tokenizer
from tests.engine.text.test_tiktoken_tokenizer import ranks

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
SPECIAL += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
SPECIAL += ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"]
UNNAMED = 12  # ids of special tokens without a name
USER = {"role": "user", "content": "Q"}


def write(path: Path, version: str = "v11", **changes: Any) -> Path:
    """Write a tekken.json as Mistral publishes it: more tokens than the model has, and special tokens without names."""
    tokens = list(ranks())
    unused = [base64.b64encode(f"unused {index}".encode()).decode() for index in range(5)]
    entries = [base64.b64encode(token).decode() for token in tokens] + unused
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(entries),
        "default_vocab_size": len(tokens) + len(SPECIAL) + UNNAMED,
        "default_num_special_tokens": len(SPECIAL) + UNNAMED,
        "version": version,
    }
    content = {
        "config": config,
        "vocab": [{"rank": rank, "token_bytes": token, "token_str": None} for rank, token in enumerate(entries)],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
        ],
    }
    (path / "tekken.json").write_text(json.dumps(content | changes))
    (path / "config.json").write_text(json.dumps({"model_type": "mistral3"}))
    return path


@pytest.fixture(scope="module")
def tekken_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tekken"))


def original(text: str) -> list[int]:
    encoding = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens={})
    return [len(SPECIAL) + UNNAMED + token for token in encoding.encode_ordinary(text)]


def test_texts_have_the_tokens_of_the_original(tekken_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(tekken_path)
    assert len(tokenizer) == len(ranks()) + len(SPECIAL) + UNNAMED

    @settings(max_examples=200)
    @given(st.lists(st.sampled_from(["The", "THING", " the", "123", "\n/", "中文", "é́", "'s", " "]) | st.text()))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        token_ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert token_ids == original(text)
        assert tokenizer.decode(token_ids) == text

    check()
    assert "incorrect regex" not in caplog.text


def test_a_text_starts_with_bos_and_ends_with_eos(tekken_path: Path) -> None:
    tokenizer = Tokenizer(tekken_path)
    assert tokenizer.encode("the") == [SPECIAL.index("<s>"), *original("the")]
    (tekken_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}{{ eos_token }}")
    token_ids = Tokenizer(tekken_path).chat_template.encode([USER])
    (tekken_path / "chat_template.jinja").unlink()
    assert token_ids == [SPECIAL.index("<s>"), SPECIAL.index("[INST]"), *original("Q"), SPECIAL.index("</s>")]


@pytest.mark.parametrize("version", ["v7", "v11", "v13", "v15"])
def test_a_missing_template_says_which_to_give(tmp_path: Path, version: str) -> None:
    with pytest.raises(RequestError) as raised:
        Tokenizer(write(tmp_path, version)).chat_template.encode([USER])
    assert f"this model has no chat template; use /v1/completions, or set chat_template: mistral_{version} in" in str(
        raised.value
    )
    assert Tokenizer(tmp_path, f"mistral_{version}").chat_template.encode([USER])


@pytest.mark.parametrize("version", ["v99", 3, None])
def test_an_unknown_version_has_no_template(tmp_path: Path, version: Any) -> None:
    with pytest.raises(RequestError, match=r"or set chat_template in the server"):
        Tokenizer(write(tmp_path, version)).chat_template.encode([USER])


def test_a_file_without_special_tokens_says_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tekken.json' lists no special_tokens.*add the checkpoint's tokenizer.j"):
        Tokenizer(write(tmp_path, "v3", special_tokens=None))


@pytest.mark.parametrize(
    "changes", [{"config": 3}, {"vocab": [{"rank": 0}]}, {"special_tokens": [3]}, {"vocab": [{"token_bytes": "a"}]}]
)
def test_a_damaged_file_is_an_error_of_the_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer could be loaded"):
        Tokenizer(write(tmp_path, **changes))
    (tmp_path / "tekken.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="no tokenizer could be loaded"):
        Tokenizer(tmp_path)


# As mistral-common writes them.
FUNCTION = {"name": "f", "description": "Finds é.", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
LISTED = f"[AVAILABLE_TOOLS]{json.dumps(TOOLS, ensure_ascii=False)}[/AVAILABLE_TOOLS]"
ARGUMENTS = [{"a": "é", "b": [1, True]}, {}]
CALLS = [
    {"id": f"abcdefgh{index}", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for index, arguments in enumerate(ARGUMENTS)
]
CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "2"}]},
    {"role": "assistant", "content": "B", "reasoning_content": "R", "tool_calls": CALLS},
    {"role": "tool", "content": "T1", "tool_call_id": "abcdefgh0"},
    {"role": "tool", "content": '{"r": 2}', "tool_call_id": "abcdefgh1"},
]
SYSTEM = "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]"
TEXT = '{"a": "é", "b": [1, true]}'
JSON_CALLS = (
    f'[{{"name": "f", "arguments": {TEXT}, "id": "abcdefgh0"}}, {{"name": "f", "arguments": {{}}, "id": "abcdefgh1"}}]'
)
RESULTS = '[TOOL_RESULTS]{}T1[/TOOL_RESULTS][TOOL_RESULTS]{}{{"r": 2}}[/TOOL_RESULTS]'
WITH_IDS = RESULTS.format("abcdefgh0[TOOL_CONTENT]", "abcdefgh1[TOOL_CONTENT]")
ID_CALLS = f"[TOOL_CALLS]f[CALL_ID]abcdefgh0[ARGS]{TEXT}[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{{}}"
ANSWER = f"[THINK]R[/THINK]B[TOOL_CALLS]f[ARGS]{TEXT}[TOOL_CALLS]f[ARGS]{{}}</s>{RESULTS.format('', '')}"
SETTINGS = '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]'
PROMPTS = {
    "mistral_v7": f"{SYSTEM}[INST]Q1[/INST]A1</s>{LISTED}[INST]Q2[/INST]B[TOOL_CALLS]{JSON_CALLS}</s>{WITH_IDS}",
    "mistral_v11": f"{SYSTEM}[INST]Q1[/INST]A1</s>{LISTED}[INST]Q2[/INST]B{ID_CALLS}</s>{WITH_IDS}",
    "mistral_v13": f"{SYSTEM}{LISTED}[INST]Q1[/INST]A1</s>[INST]Q2[/INST]{ANSWER}",
    "mistral_v15": f"{SYSTEM}{LISTED}{SETTINGS}[INST]Q1[/INST]A1</s>[INST]Q2[/INST]{ANSWER}",
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(tekken_path: Path, name: str) -> None:
    tokenizer = Tokenizer(tekken_path, name)
    token_ids = tokenizer.chat_template.encode(CONVERSATION, template_options={"tools": TOOLS})
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == PROMPTS[name]
    late = [{"role": "assistant", "content": "A"}, {"role": "system", "content": "S"}]
    assert tokenizer.decode(tokenizer.chat_template.encode([USER, *late])).endswith("AS")
    with pytest.raises(RequestError, match="role critic is unknown"):
        tokenizer.chat_template.encode([USER, {"role": "critic", "content": ""}])


def test_the_effort_of_version_15(tekken_path: Path) -> None:
    tokenizer = Tokenizer(tekken_path, "mistral_v15")
    token_ids = tokenizer.chat_template.encode([USER], template_options={"reasoning_effort": "high"})
    assert '{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]Q' in tokenizer.decode(
        token_ids, skip_special_tokens=False
    )

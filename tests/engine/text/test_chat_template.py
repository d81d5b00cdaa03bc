"""The prompt of a conversation is what transformers' own apply_chat_template makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import CHAT_TEMPLATE, save_tokenizer

# Templates that trim, that do not, that write a header for every message, and that add a BOS.
TEMPLATES = {
    "trims": CHAT_TEMPLATE,
    "keeps": CHAT_TEMPLATE.replace(" | trim", ""),
    "turns": "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}",
}
CONVERSATIONS = [
    [("user", "the cache"), ("assistant", "holds the")],
    [("user", "the cache"), ("assistant", "holds the ")],
    [("user", "the cache"), ("assistant", " holds\n")],
    [("system", "keys"), ("user", "values"), ("assistant", "€ and")],
    [("user", "every token")],
    [("user", "every token"), ("assistant", "")],
]
WAYS: list[dict[str, Any]] = [
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_equal_those_of_transformers(tmp_path: Path, template: str, way: dict[str, Any]) -> None:
    save_tokenizer(tmp_path, TEMPLATES[template])
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in conversation]
        expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **way)
        assert ours.chat_template.encode(messages, **way) == expected, conversation


def test_a_continued_message_keeps_special_tokens_as_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]
    ids = tokenizer.chat_template.encode(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\nb<|im_end|>c")
    assert ids.count(4) == 1  # <|im_end|>, of the first message


def test_special_tokens_of_the_tokenizer_come_besides_those_of_the_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    from tokenizers.processors import TemplateProcessing

    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a")[0] == 1
    messages = [{"role": "user", "content": "the cache"}]
    plain = tokenizer.chat_template.encode(messages)
    assert tokenizer.chat_template.encode(messages, add_special_tokens=True) == [1, *plain, 2]


IMAGE_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<image_soft_token>", "[IMG]"]


@pytest.mark.parametrize("token", IMAGE_TOKENS)
def test_image_tokens_that_a_message_spells_out_stay_text(tmp_path: Path, token: str) -> None:
    """The embedding of an image's placeholder means nothing without the image."""
    save_tokenizer(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    fast.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    fast.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    for content in (token, f"What is {token}{token}?"):
        ids = tokenizer.chat_template.encode([{"role": "user", "content": content}])
        assert not set(ids) & tokenizer.special_token_ids(IMAGE_TOKENS)
        assert content in tokenizer.decode(ids)
    assert tokenizer.special_token_ids([token]) <= set(tokenizer.encode(token))  # in plain text it is the token


# Reads the parts of type text, as those of Llava, SmolVLM and others do; content that is a string is left out.
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role | upper }}: {% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_template_that_reads_only_parts_gets_parts(tmp_path: Path, way: dict[str, Any]) -> None:
    save_tokenizer(tmp_path, PARTS_ONLY)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for conversation in CONVERSATIONS[:4]:
        messages = [{"role": role, "content": content} for role, content in conversation]
        expected = theirs.apply_chat_template(in_parts(messages), tokenize=True, return_dict=False, **way)
        assert ours.chat_template.encode(messages, **way) == expected, conversation


def test_a_late_system_message_is_seen_in_parts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, PARTS_ONLY)
    messages = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("system", "b"), ("user", "<|im_end|>"))
    ]
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.chat_template.encode(messages)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "USER: a<|im_end|>\nSYSTEM: b<|im_end|>\nUSER: <|im_end|><|im_end|>\nASSISTANT:"
    assert ids.count(4) == 3  # the template's own <|im_end|>


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages | tojson }}", "a fixed prompt"])
def test_templates_that_take_text_get_text(tmp_path: Path, template: str) -> None:
    save_tokenizer(tmp_path, template)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "the cache"}]
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ours.chat_template.encode(messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(("kind", "media"), [("image", "images"), ("image_url", "images"), ("input_audio", "sound")])
def test_an_image_is_no_placeholder_in_a_prompt(tmp_path: Path, kind: str, media: str) -> None:
    """The template would write one, and the image would be lost without an error."""
    template = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    save_tokenizer(tmp_path, template)
    tokenizer = Tokenizer(tmp_path)
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    ids = tokenizer.chat_template.encode([{"role": "user", "content": parts}])
    assert tokenizer.decode(ids) == "What is this?"
    with pytest.raises(
        RequestError, match=f"type '{kind}' is not supported: models are served for text, without {media}"
    ):
        tokenizer.chat_template.encode([{"role": "user", "content": [*parts, {"type": kind}]}])

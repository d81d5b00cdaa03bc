"""A model with tool calls and reasoning: a tokenizer, and an ingress over fake engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine.pooling.info import PoolingInfo
from engine.text.tokenizer import Tokenizer
from tests.deployments.conftest import OpenClient
from tests.deployments.fakes import INFO, FakeEngines, output
from tests.engine.tiny_tokenizers import save_tokenizer

# As Qwen3's: the markers of calls are special tokens here, so that a parser has to ask for them.
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function | tojson }}{% endfor %}"
    "{% for d in documents or [] %}<doc>{{ d.text }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}<|im_end|>\n{% endfor %}{{ reasoning_effort }}{{ extra }}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ opening }}{# <tool_call> #}"
)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


POOLED = replace(
    INFO,
    num_blocks=0,
    pooling=PoolingInfo("embed", 1, matryoshka=(1,), prompts=(("query", "query: "),)),
)


@pytest.fixture
def open_pooled(open_client: OpenClient, engines: FakeEngines, tokenizer_path: Path) -> Callable[[str], TestClient]:
    """Return a function that starts an ingress over fake engines with a task."""

    def start(task: str) -> TestClient:
        scores = PoolingInfo("score", 1)
        engines.engine_info = POOLED if task == "embed" else replace(POOLED, pooling=scores)
        return open_client(task=task)

    return start


@pytest.fixture(scope="session")
def parsed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model whose template implies parsers."""
    path = tmp_path_factory.mktemp("parsed")
    save_tokenizer(path, TEMPLATE)
    (path / "config.json").write_text('{"model_type": "llama"}')
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *MARKERS]})
    tokenizer.save_pretrained(path)
    assert Tokenizer(path).special_token_ids(MARKERS)
    return path


@pytest.fixture
def tokenizer(parsed_path: Path) -> Tokenizer:
    return Tokenizer(parsed_path)


@pytest.fixture
def parsed(open_client: OpenClient, parsed_path: Path) -> TestClient:
    """A client of that model."""
    return open_client(model=str(parsed_path))


Answers = Callable[..., None]


@pytest.fixture
def answers(engines: FakeEngines, tokenizer: Tokenizer) -> Answers:
    """Return a function that sets the text of all answers, which come in batches of ``size`` tokens."""

    def set_text(text: str, *, size: int = 1, finish_reason: str = "stop") -> None:
        ids = [*tokenizer.encode(text, add_special_tokens=False), 2]  # 2 is EOS
        batches = [ids[start : start + size] for start in range(0, len(ids), size)]
        engines.scripts = [[output(batch, finish_reason if batch is batches[-1] else None) for batch in batches]]

    return set_text

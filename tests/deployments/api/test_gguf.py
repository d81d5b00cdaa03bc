"""A GGUF file is served: config, weights, tokenizer, chat template, stop tokens and grammars come from it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from engine.llm import LLM
from tests.deployments.conftest import OpenClient
from tests.deployments.real_engines import RealEngines
from tests.engine.models.gguf.converted import build_model, write_gguf
from tests.engine.oracle import eos_ids
from tests.engine.text.gguf_originals import NUM_PADDING, add_tokenizer, save_original

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "the cache <|im_start|> holds?"}]
MAX_TOKENS = 12
KIND = "qwen2"


class Served:
    """A file, and the model and tokenizer of transformers that it was written from."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tiny-Q4_K_M.gguf"
        self.tokenizer: PreTrainedTokenizerFast = save_original(KIND, directory / "original")
        self.model: Any = build_model("qwen3", vocab_size=len(self.tokenizer) + NUM_PADDING)
        write_gguf(
            self.model, "qwen3", self.path, add_tokenizer=lambda writer: add_tokenizer(writer, KIND, self.tokenizer)
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def llm(served: Served) -> LLM:
    return LLM(str(served.path), dtype="float32", kv_cache_memory="8MiB")


@pytest.fixture
def engines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> RealEngines:
    """The engine of ``llm``."""
    engines = RealEngines(llm.engine)
    monkeypatch.setattr("deployments.ingress.Dispatcher", lambda *_, **__: engines)
    return engines


@pytest.fixture
def client(open_client: OpenClient, served: Served) -> TestClient:
    return open_client(model=str(served.path), model_name=None)


def _chat(client: TestClient, **options: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True} | options
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice, model=answer.json()["model"])


def test_a_chat_equals_transformers(client: TestClient, served: Served, llm: LLM) -> None:
    choice = _chat(client)
    assert choice["model"] == "tiny-Q4_K_M"
    prompt = torch.tensor([choice["prompt_token_ids"]])
    rendered = "user: the cache <|im_start|> holds?\n"
    assert served.tokenizer.decode(choice["prompt_token_ids"]) == rendered
    im_start = served.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert im_start not in choice["prompt_token_ids"]  # spelled out by a user, it is text
    with eos_ids(served.model, []):
        output = served.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_TOKENS, do_sample=False
        )
    expected = output[0, prompt.shape[1] :].tolist()
    stops = set(served.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert set(llm.engine.info.eos_token_ids) == stops
    end = next((i for i, token in enumerate(expected) if token in stops), len(expected))
    assert choice["token_ids"][:end] == expected[:end]
    assert choice["message"]["content"] == served.tokenizer.decode(expected[:end], skip_special_tokens=True)


def test_a_grammar_limits_an_answer(client: TestClient) -> None:
    choice = _chat(client, structured_outputs={"regex": "(keys|values){2}[0-9]"}, max_tokens=30)
    assert choice["finish_reason"] == "stop"
    content = choice["message"]["content"]
    assert content[:-1] in {a + b for a in ("keys", "values") for b in ("keys", "values")}
    assert content[-1].isdecimal()

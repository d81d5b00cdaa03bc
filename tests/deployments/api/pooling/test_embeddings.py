"""POST /v1/embeddings and /pooling, over a real engine."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from tests.deployments.api.pooling.conftest import OpenPooled
from tests.engine.pooling import oracle
from tests.engine.pooling.checkpoints import HIDDEN, save_causal_model

TEXTS = ["the cache holds keys", "what is a query", "memory", "a " * 40]


@pytest.fixture
def client(open_pooled: OpenPooled, embedder: Path) -> TestClient:
    return open_pooled(embedder, "embed")


def embed(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def vectors_of(content: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([item["embedding"] for item in content["data"]])


def expected(path: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """Return the vectors that transformers and sentence-transformers' pooling give."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = oracle.vectors(path, [tokenizer(text)["input_ids"] for text in texts], "mean_tokens")
    normalised: np.ndarray[Any, Any] = (rows / rows.norm(dim=1, keepdim=True)).numpy()
    return normalised


def test_vectors_of_texts(client: TestClient, embedder: Path) -> None:
    content = embed(client, input=TEXTS, model="tiny")
    np.testing.assert_allclose(vectors_of(content), expected(embedder, TEXTS), atol=1e-5)
    assert [item["index"] for item in content["data"]] == list(range(len(TEXTS)))
    assert {item["object"] for item in content["data"]} == {"embedding"}
    assert (content["object"], content["model"]) == ("list", "tiny")
    tokens = sum(len(ids) for ids in AutoTokenizer.from_pretrained(embedder)(TEXTS)["input_ids"])
    assert content["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_one_text_token_ids_and_lists_of_them(client: TestClient, embedder: Path) -> None:
    text = TEXTS[0]
    ids = AutoTokenizer.from_pretrained(embedder)(text)["input_ids"]
    one = vectors_of(embed(client, input=text))
    assert np.array_equal(one, vectors_of(embed(client, input=ids)))
    assert np.array_equal(one, vectors_of(embed(client, input=[ids, [7]]))[:1])


def test_base64_is_little_endian_float32(client: TestClient) -> None:
    content = embed(client, input=TEXTS, encoding_format="base64")
    decoded = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in content["data"]])
    assert np.array_equal(decoded, vectors_of(embed(client, input=TEXTS)).astype("<f4"))


def test_prompts_are_put_before_texts(client: TestClient, embedder: Path) -> None:
    content = embed(client, input=TEXTS, prompt_name="query")
    prompted = [f"what is {text}" for text in TEXTS]
    np.testing.assert_allclose(vectors_of(content), expected(embedder, prompted), atol=1e-5)
    answer = client.post("/v1/embeddings", json={"input": "a", "prompt_name": "passage"})
    assert (
        "prompt_name='passage' is not a prompt of this model; choose one of its prompts (query, document)"
        in answer.text
    )


def test_long_texts_are_refused_or_cut(client: TestClient, embedder: Path) -> None:
    """The longest text has the tokens of sentence_bert_config.json, the special ones included."""
    long = "the cache " * 50
    error = client.post("/v1/embeddings", json={"input": [long]}).json()["error"]
    assert error["message"] == (
        "input has 102 tokens, but the context of 'tiny' holds 64; shorten it, or set truncate_prompt_tokens"
    )
    assert error["param"] == "input"
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    for wanted, length in ((-1, 64), (10, 10)):
        cut = embed(client, input=long, truncate_prompt_tokens=wanted)
        ids = tokenizer(long, truncation=True, max_length=length)["input_ids"]
        assert cut["usage"]["prompt_tokens"] == length
        rows = oracle.vectors(embedder, [ids], "mean_tokens")
        np.testing.assert_allclose(vectors_of(cut), rows / rows.norm(dim=1, keepdim=True), atol=1e-5)
    assert embed(client, input=[[7] * 80], truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 64
    answer = client.post("/v1/embeddings", json={"input": "a", "truncate_prompt_tokens": 65})
    assert "truncate_prompt_tokens=65 is out of range; give 1..64, or -1 for the longest" in answer.text


def test_dimensions_are_for_matryoshka_models(client: TestClient, open_pooled: OpenPooled, embedder: Path) -> None:
    error = client.post("/v1/embeddings", json={"input": "a", "dimensions": 8}).json()["error"]
    assert "dimensions=8 cuts vectors of 64 numbers" in error["message"]
    assert "args.pooling.matryoshka" in error["message"]
    assert len(vectors_of(embed(client, input="a", dimensions=HIDDEN))[0]) == HIDDEN
    some = open_pooled(embedder, "embed", pooling={"matryoshka": [8, 32]})
    cut, whole = vectors_of(embed(some, input=TEXTS, dimensions=8)), vectors_of(embed(some, input=TEXTS))[:, :8]
    np.testing.assert_allclose(cut, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-6)
    answer = some.post("/v1/embeddings", json={"input": "a", "dimensions": 9})
    assert "dimensions=9 is not offered; give one of (8, 32)" in answer.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "input='' has an empty text"),
        ({"input": []}, "input=[] is empty; give at least one text"),
        ({"input": ["a", ""]}, "has an empty text"),
        ({"input": [[]]}, "input=[] is empty; give at least one token"),
        ({"input": [384]}, "has the id 384"),
        ({"input": [[5, -1]]}, "is invalid"),
        ({"input": [True]}, "is invalid"),
        ({"input": ["a", 5]}, "is invalid"),
        ({"input": "\ud800"}, "unpaired surrogate"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format='int8' is invalid"),
        ({"input": "a", "dimensions": 0}, "dimensions=0 is invalid"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 is out of range"),
        ({"input": ["a"] * 2049}, "input has 2049 texts; give at most 2048"),
        ({}, "input is missing"),
    ],
    ids=str,
)
def test_invalid_bodies(client: TestClient, body: dict[str, Any], message: str) -> None:
    content = json.dumps(body).encode()  # httpx would not send an unpaired surrogate
    answer = client.post("/v1/embeddings", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_large_request_is_written_in_slices(client: TestClient) -> None:
    """More floats than one slice has; each item is where it belongs."""
    texts = [f"token {'a ' * (index % 7)}" for index in range(600)]
    content = embed(client, input=texts)
    assert [item["index"] for item in content["data"]] == list(range(600))
    few = vectors_of(embed(client, input=texts[:7]))
    assert all(np.array_equal(row, few[index % 7]) for index, row in enumerate(vectors_of(content)))


def test_pooling_has_the_same_vectors_in_its_own_shape(client: TestClient) -> None:
    answer = client.post("/pooling", json={"input": TEXTS, "normalize": False}).json()
    assert {item["object"] for item in answer["data"]} == {"pooling"}
    rows = np.array([item["data"] for item in answer["data"]])
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(rows / lengths, vectors_of(embed(client, input=TEXTS)), atol=1e-6)
    assert not np.allclose(lengths, 1)


def test_endpoints_of_other_tasks_say_what_to_use(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", chat | {"model": "tiny", "max_tokens": 3}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ]
    for path, body in wrong:
        answer = client.post(path, json=body)
        assert answer.status_code == 400, path
        assert "task: embed" in answer.json()["error"]["message"], path
        assert "/v1/embeddings" in answer.json()["error"]["message"], path
    assert client.post("/v1/embeddings", json={"input": "a", "model": "x"}).status_code == 404


def test_the_model_says_what_it_serves(client: TestClient) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["task"], card["max_model_len"]) == ("embed", 64)
    pooling = client.get("/server_info").json()["engine"]["pooling"]
    assert (pooling["task"], pooling["dimensions"], pooling["pooling_type"]) == ("embed", HIDDEN, "mean")
    assert client.post("/tokenize", json={"prompt": "the cache"}).json()["count"] == 4
    assert client.get("/").status_code == 404  # the page's playground needs generated text


def test_a_decoder_embeds_with_its_last_token(open_pooled: OpenPooled, tmp_path: Path) -> None:
    client = open_pooled(save_causal_model(tmp_path, "qwen3"), "embed", pooling={"matryoshka": True})
    rows = vectors_of(embed(client, input=TEXTS, dimensions=5))
    assert rows.shape == (len(TEXTS), 5)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)


def test_a_request_of_a_generating_server_is_refused(plain_client: TestClient) -> None:
    error = plain_client.post("/v1/embeddings", json={"input": "a"}).json()["error"]
    assert "served with task: generate, and this endpoint needs task: embed" in error["message"]
    assert error["code"] == "wrong_task"

"""Embeddings of a server that is started as a user starts it, through OpenAI's own client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.deployments.batch.conftest import line, lines_of, run
from tests.e2e.server import Server, running_server
from tests.engine.pooling import oracle
from tests.engine.pooling.checkpoints import HIDDEN, save_model, save_sentence_files
from tests.waiting import HANG_S

TEXTS = ["the cache holds keys", "what is a query", "memory"]
NUM_MANY = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("embedder"), "bert")
    save_sentence_files(path, "mean_tokens")
    return path


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Server]:
    """A server with two replicas of an embedding model, with the shipped options otherwise."""

    def change(args: dict[str, Any]) -> None:
        args.update(model=str(checkpoint), model_name="tiny", task="embed", pooling={"matryoshka": True})
        args["replicas"].update(num_engine_replicas=2, cpus_per_engine=0.1)
        args["batches"]["directory"] = str(tmp_path_factory.mktemp("batches"))

    with running_server(tmp_path_factory.mktemp("embeddings"), change) as running:
        yield running


@pytest.mark.long
def test_openais_client_gets_the_vectors_of_sentence_transformers(embedding_server: Server, checkpoint: Path) -> None:
    """The client asks for base64 unless it is told otherwise, and decodes it."""
    tokenized = httpx.post(f"{embedding_server.url}/tokenize", json={"prompt": TEXTS[0]}, timeout=HANG_S).json()
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0) as client:
        decoded = client.embeddings.create(model="tiny", input=TEXTS)
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        raw = client.embeddings.with_raw_response.create(model="tiny", input=TEXTS, encoding_format="base64")
        cut = client.embeddings.create(model="tiny", input=tokenized["tokens"], dimensions=8)
        many = client.embeddings.create(model="tiny", input=TEXTS * (NUM_MANY // len(TEXTS)))
        (model,) = client.models.list().data
        with pytest.raises(openai.BadRequestError, match="task: embed and generates no text"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    vectors = np.array([item.embedding for item in decoded.data])
    rows = oracle.vectors(checkpoint, [tokenized["tokens"]], "mean_tokens")[0]
    np.testing.assert_allclose(vectors[0], rows / rows.norm(), atol=1e-5)
    assert vectors.shape == (len(TEXTS), HIDDEN)
    assert np.array_equal(vectors, np.array([item.embedding for item in plain.data]))
    encoded = raw.http_response.json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(encoded), "<f4"), vectors[0].astype("<f4"))
    np.testing.assert_allclose(cut.data[0].embedding, rows[:8] / rows[:8].norm(), atol=1e-5)
    assert decoded.usage.prompt_tokens == decoded.usage.total_tokens > 0
    assert all(np.array_equal(item.embedding, vectors[index % len(TEXTS)]) for index, item in enumerate(many.data))
    assert model.id == "tiny"
    assert model.to_dict()["task"] == "embed"
    samples = embedding_server.metrics_of_all()
    tasks = [dict(labels)["task"] for name, labels in samples if name == "pagoda_engine_info"]
    assert tasks == ["embed", "embed"]
    finished = [value for (name, _), value in samples.items() if name == "pagoda_requests_finished_total"]
    assert sum(finished) >= NUM_MANY
    embedding_server.wait_for_line("path=/v1/embeddings")  # Ray forwards the ingress's lines a little later


@pytest.mark.long
def test_a_batch_has_the_vectors_of_single_requests(embedding_server: Server) -> None:
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0) as client:
        lines = [line(str(number), "/v1/embeddings", model="tiny", input=TEXTS * (number + 1)) for number in range(40)]
        batch = run(client, "\n".join(lines), "/v1/embeddings")
        assert batch.status == "completed"
        direct = [item.embedding for item in client.embeddings.create(model="tiny", input=TEXTS).data]
        results = lines_of(client, batch.output_file_id)
    assert [item["custom_id"] for item in results] == [str(number) for number in range(40)]
    for number, item in enumerate(results):
        vectors = [data["embedding"] for data in item["response"]["body"]["data"]]
        np.testing.assert_allclose(vectors, direct * (number + 1), atol=1e-5)

"""Vectors and scores equal those of the package sentence-transformers itself, from the text on."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

from engine.pooling.model import Text
from engine.pooling.params import PoolingParams
from engine.text.tokenizer import Tokenizer
from tests.engine.pooling import test_scores, test_vectors
from tests.engine.pooling.checkpoints import (
    CLASSIFIERS,
    ENCODERS,
    FAMILIES,
    MAX_LEN,
    WORDS,
    save_classifier,
    save_encoder_tokenizer,
    save_model,
    save_sentence_files,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    sbert = pytest.importorskip("sentence_transformers", reason="of the extra `clients`")

pytestmark = pytest.mark.long
TOLERANCE = 1e-5


def random_texts(seed: int) -> list[str]:
    """Return texts of one word to as many as a model takes."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=length)) for length in (1, 2, 17, 33, 5, MAX_LEN // 6, 3, 9)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 8], ids=["alone", "padded"])
def test_vectors_of_each_family(family: str, batch_size: int, tmp_path: Path) -> None:
    pooling = "mean_tokens" if family in ENCODERS else "lasttoken"
    save_model(tmp_path, family)
    save_sentence_files(tmp_path, pooling, max_tokens=MAX_LEN)
    theirs = sbert.SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"dtype": torch.float32})
    texts, tokenizer = random_texts(1), Tokenizer(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs.encode(texts, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False)
    runner = test_vectors.load(tmp_path)
    encoded = [tokenizer.encode(text) for text in texts]
    together = test_vectors.run(runner, encoded)
    alone = torch.cat([test_vectors.run(runner, [ids]) for ids in encoded])
    for vectors in (together, alone):
        torch.testing.assert_close(vectors, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "has_token_types"), [("bert", True), *((family, False) for family in CLASSIFIERS)])
def test_scores_of_each_family(family: str, has_token_types: bool, tmp_path: Path) -> None:
    save_classifier(tmp_path, family)
    save_encoder_tokenizer(tmp_path, has_token_types=has_token_types)
    query, documents = "what is a block", random_texts(2)
    theirs = sbert.CrossEncoder(str(tmp_path), device="cpu", model_kwargs={"dtype": torch.float32})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranked = theirs.rank(query, documents, show_progress_bar=False)
    tokenizer = Tokenizer(tmp_path)
    texts = []
    for document in documents:
        token_ids, num_first = tokenizer.encode_pair(query, document)
        texts.append(Text(token_ids, PoolingParams(num_first=num_first)))
    scores = test_scores.run(test_scores.load(tmp_path), texts)[:, 0]
    expected = torch.tensor([row["score"] for row in sorted(ranked, key=lambda row: row["corpus_id"])])
    torch.testing.assert_close(scores, expected, atol=TOLERANCE, rtol=0)
    assert scores.argsort(descending=True).tolist() == [row["corpus_id"] for row in ranked]

"""Scores equal those of transformers' classifiers, and of Qwen3-Reranker's own way with a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from engine.config import EngineConfig
from engine.pooling.config import PoolingConfig
from engine.pooling.model import Text
from engine.pooling.params import PoolingParams
from engine.pooling.runner import PoolingRunner
from engine.text.tokenizer import Tokenizer
from tests.engine.pooling import oracle
from tests.engine.pooling.checkpoints import CLASSIFIERS, save_causal_model, save_classifier, write_json

PAIRS = [
    ("what is a block", "the cache holds blocks"),
    ("what is a block", "memory"),
    ("a", "the values of every token a query finds in paged memory"),
    ("query", "no"),
]


def load(path: Path) -> PoolingRunner:
    return PoolingRunner(EngineConfig(model=str(path), device="cpu"), PoolingConfig(task="score"))


def run(runner: PoolingRunner, texts: list[Text]) -> torch.Tensor:
    return torch.tensor(np.stack([np.frombuffer(result, "<f4") for result in runner.run(texts)]))


def encoded_pairs(path: Path) -> tuple[list[Any], list[Text]]:
    """Return the pairs as transformers encodes them, and as the ingress does."""
    theirs = AutoTokenizer.from_pretrained(path)
    items = [theirs(*pair, return_token_type_ids=True) for pair in PAIRS]
    ours = Tokenizer(path)
    texts = []
    for pair in PAIRS:
        token_ids, num_first = ours.encode_pair(*pair)
        texts.append(Text(token_ids, PoolingParams(num_first=num_first)))
    return items, texts


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_reranker_scores_pairs_as_transformers(family: str, tmp_path: Path) -> None:
    save_classifier(tmp_path, family)
    items, texts = encoded_pairs(tmp_path)
    expected = oracle.classifier_logits(tmp_path, items)
    scores = run(load(tmp_path), texts)
    torch.testing.assert_close(scores, expected.sigmoid(), atol=1e-5, rtol=0)
    assert scores[:, 0].argsort().tolist() == expected[:, 0].argsort().tolist()
    logits = run(
        load(tmp_path),
        [text._replace(params=PoolingParams(None, None, False, text.params.num_first)) for text in texts],
    )
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_modernbert_pools_for_its_head_as_its_config_says(tmp_path: Path) -> None:
    save_classifier(tmp_path, "modernbert", classifier_pooling="mean")
    items, texts = encoded_pairs(tmp_path)
    expected = oracle.classifier_logits(tmp_path, items).sigmoid()
    torch.testing.assert_close(run(load(tmp_path), texts), expected, atol=1e-5, rtol=0)


def test_several_labels_have_probabilities(tmp_path: Path) -> None:
    save_classifier(tmp_path, "bert", num_labels=3)
    items, texts = encoded_pairs(tmp_path)
    runner = load(tmp_path)
    expected = oracle.classifier_logits(tmp_path, items).softmax(dim=1)
    torch.testing.assert_close(run(runner, texts), expected, atol=1e-5, rtol=0)
    assert runner.info.pooling is not None
    assert runner.info.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_the_activation_of_config_json_counts(key: str, tmp_path: Path) -> None:
    save_classifier(tmp_path, "bert")
    name = "torch.nn.modules.linear.Identity"
    config = oracle.config_json(tmp_path) | {key: {"activation_fn": name} if key == "sentence_transformers" else name}
    write_json(tmp_path / "config.json", config)
    items, texts = encoded_pairs(tmp_path)
    expected = oracle.classifier_logits(tmp_path, items)
    torch.testing.assert_close(run(load(tmp_path), texts), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_answers_yes_or_no(tied: bool, tmp_path: Path) -> None:
    save_causal_model(tmp_path, "qwen3", tie_word_embeddings=tied)
    add_words(tmp_path, ["yes", "no"])
    tokenizer = Tokenizer(tmp_path)
    no, yes = tokenizer.single_token_id("no"), tokenizer.single_token_id("yes")
    assert no is not None
    assert yes is not None
    texts = [tokenizer.encode(f"{query} {document}") for query, document in PAIRS]
    expected = oracle.yes_probabilities(tmp_path, texts, no, yes)
    scores = run(load(tmp_path), [Text(text, PoolingParams()) for text in texts])
    torch.testing.assert_close(scores[:, 0], expected, atol=1e-5, rtol=0)


def add_words(path: Path, words: list[str]) -> None:
    """Add words as single tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(words)
    tokenizer.save_pretrained(path)
    assert len(tokenizer) <= 384

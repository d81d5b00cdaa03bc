"""Vectors equal those of transformers with sentence-transformers' pooling, whatever is computed together."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from engine.config import EngineConfig
from engine.pooling.config import PoolingConfig
from engine.pooling.model import Text
from engine.pooling.params import PoolingParams
from engine.pooling.runner import PoolingRunner
from kernels.cpu.library import library
from tests.engine.pooling import oracle
from tests.engine.pooling.checkpoints import (
    ENCODERS,
    FAMILIES,
    HIDDEN,
    MAX_LEN,
    VOCAB_SIZE,
    save_causal_model,
    save_model,
    save_sentence_files,
)

TOLERANCE = 1e-5


def random_texts(seed: int, lengths: tuple[int, ...] = (1, 2, 17, 33, 5, MAX_LEN, 64, 40)) -> list[list[int]]:
    """Return texts of the given lengths, without the special tokens of either tokenizer."""
    rng = random.Random(seed)
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def load(path: Path, **options: object) -> PoolingRunner:
    return PoolingRunner(EngineConfig(model=str(path), device="cpu"), PoolingConfig(task="embed", **options))  # type: ignore[arg-type]


def run(runner: PoolingRunner, texts: list[list[int]], **params: object) -> torch.Tensor:
    results = runner.run([Text(text, PoolingParams(**params)) for text in texts])  # type: ignore[arg-type]
    return torch.tensor(np.stack([np.frombuffer(result, "<f4") for result in results]))


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_each_family_equal_transformers(family: str, tmp_path: Path) -> None:
    pooling = "mean_tokens" if family in ENCODERS else "lasttoken"
    save_model(tmp_path, family)
    save_sentence_files(tmp_path, pooling)
    runner, texts = load(tmp_path), random_texts(1)
    expected = F.normalize(oracle.vectors(tmp_path, texts, pooling), dim=1)
    together = run(runner, texts)
    torch.testing.assert_close(together, expected, atol=TOLERANCE, rtol=0)
    padded = F.normalize(oracle.vectors(tmp_path, texts, pooling, padded=True), dim=1)
    torch.testing.assert_close(together, padded, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(library() is None, reason="the C kernels give a row the same bits in every batch")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_same_bits_alone_and_in_every_batch(family: str, tmp_path: Path) -> None:
    runner = load(save_model(tmp_path, family))
    texts = random_texts(2)
    together = run(runner, texts)
    for index, text in enumerate(texts):
        assert torch.equal(run(runner, [text])[0], together[index])
    order = random.Random(3).sample(range(len(texts)), len(texts))
    assert torch.equal(run(runner, [texts[index] for index in order]), together[order])


@pytest.mark.parametrize(
    "pooling", ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
)
def test_every_pooling_of_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    save_model(tmp_path, "bert")
    save_sentence_files(tmp_path, pooling, normalize=False)
    texts = random_texts(4)
    torch.testing.assert_close(
        run(load(tmp_path), texts), oracle.vectors(tmp_path, texts, pooling), atol=TOLERANCE, rtol=1e-5
    )


def test_a_dense_layer_follows_the_pooling(tmp_path: Path) -> None:
    save_model(tmp_path, "bert")
    save_sentence_files(tmp_path, "cls_token", dense=24)
    texts = random_texts(5)
    runner = load(tmp_path)
    assert runner.info.pooling is not None
    assert runner.info.pooling.dimensions == 24
    expected = F.normalize(oracle.dense(tmp_path, oracle.vectors(tmp_path, texts, "cls_token")), dim=1)
    torch.testing.assert_close(run(runner, texts), expected, atol=TOLERANCE, rtol=0)


def test_vectors_are_cut_and_normalised_again(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    texts = random_texts(6)
    runner = load(tmp_path, matryoshka=True)
    cut = run(runner, texts, dimensions=10)
    torch.testing.assert_close(cut.norm(dim=1), torch.ones(len(texts)))
    whole = run(runner, texts, normalize=False)
    assert whole.shape == (len(texts), HIDDEN)
    torch.testing.assert_close(cut, F.normalize(whole[:, :10], dim=1), atol=1e-6, rtol=0)


def test_without_sentence_files_the_architecture_decides(tmp_path: Path) -> None:
    """An encoder gives the mean, as sentence-transformers does; a decoder the last token, normalised, as in vLLM."""
    texts = random_texts(7)
    encoder, decoder = save_model(tmp_path / "e", "bert"), save_causal_model(tmp_path / "d", "qwen2")
    mean = oracle.vectors(encoder, texts, "mean_tokens")
    torch.testing.assert_close(run(load(encoder), texts), mean, atol=TOLERANCE, rtol=1e-5)
    last = F.normalize(oracle.vectors(decoder, texts, "lasttoken"), dim=1)
    torch.testing.assert_close(run(load(decoder), texts), last, atol=TOLERANCE, rtol=0)
    forced = run(load(decoder, pooling_type="mean", normalize=False), texts)
    expected = oracle.vectors(decoder, texts, "mean_tokens")
    torch.testing.assert_close(forced, expected, atol=TOLERANCE, rtol=1e-5)

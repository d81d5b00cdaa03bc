"""Two steps of the run with tools, from random weights."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from demo import train
from demo.conversations import TALKS
from demo.corpus import Corpus, load_corpus
from demo.demo_model import DemoModel
from demo.tokenize_chat import ChatEncoder, train_tokenizer, with_numbers_and_markers
from demo.train import Batches, Run, grow, make_model

RUN = Run("two steps", steps=2, peak_lr=1e-3, seed=1, drills=1.0, mix=TALKS, tool_talks=0.5, dropout=0.05)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CONVERSATIONS_PER_POOL", 8)


def test_batches_have_calls_in_the_loss(corpus: Corpus) -> None:
    tokenizer = with_numbers_and_markers(train_tokenizer(corpus.answers()))
    call = tokenizer.convert_tokens_to_ids("<tool_call>")
    stream = iter(Batches(corpus, ChatEncoder(tokenizer), RUN))
    assert any((labels == call).any() for _, labels in islice(stream, 20))


def test_weights_are_saved_in_bfloat16_and_trained_in_float32(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "STEPS_PER_CHECKPOINT", 2)
    monkeypatch.setattr(train, "TOKENS_PER_BATCH", 64)  # bfloat16 is slow on a CPU without instructions for it
    tokenizer = train_tokenizer(corpus.answers())
    model = make_model(tokenizer)
    tokenizer = grow(model, tokenizer)
    before = model.lm_head.weight.detach().clone()
    train.train(model, tokenizer, corpus, RUN, tmp_path)
    assert model.dtype == torch.float32
    assert not torch.equal(model.lm_head.weight, before)
    assert not model.model.embed_tokens._forward_hooks  # dropout ends with the run
    saved = DemoModel(torch.bfloat16, tmp_path)
    assert torch.equal(saved.model.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))
    assert saved.calls_tools


def test_a_model_grows_once_and_keeps_what_it_knows(corpus: Corpus) -> None:
    small = train_tokenizer(corpus.answers())
    model = make_model(small)
    before = model.lm_head.weight.detach().clone()
    tokenizer = grow(model, small)
    after = model.lm_head.weight.detach().clone()
    assert torch.equal(after[: len(small)], before)
    assert len(after) == len(tokenizer) == model.config.vocab_size
    assert after[len(small) :].norm(dim=1).min() > 0
    assert grow(model, tokenizer) is tokenizer
    assert torch.equal(model.lm_head.weight, after)

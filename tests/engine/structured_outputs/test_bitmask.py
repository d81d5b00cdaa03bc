"""Bitmasks of allowed tokens, as tensors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from engine.options.structured_outputs import StructuredOutputsParams
from engine.structured_outputs.bitmask import MaskBuilder, apply_bitmask, fill_bitmask
from engine.structured_outputs.compiler import GrammarCompiler
from tests.engine.structured_outputs.random_texts import (
    TOKENS,
    allowed_tokens,
)


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "indices"),
    [
        (torch.float32, 1, [0, 1, 2, 3]),
        (torch.bfloat16, 31, [0, 1, 2, 3]),
        (torch.float32, 32, [2]),
        (torch.bfloat16, 32, [1, 2, 3]),
        (torch.float32, 33, [3, 0]),
        (torch.bfloat16, 33, [3, 2]),
        (torch.float32, 100, [1, 2, 3]),
        (torch.bfloat16, 1, [2]),
        (torch.float32, 3077, [3, 2]),
        (torch.bfloat16, 3077, [3, 0]),
        (torch.float32, 31, []),
    ],
)
def test_apply_bitmask_agrees_with_a_loop(dtype: torch.dtype, vocab_size: int, indices: list[int]) -> None:
    rng = np.random.default_rng(vocab_size + len(indices))
    words = rng.integers(-(2**31), 2**31, (len(indices), -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    logits = torch.randn(4, vocab_size).to(dtype)
    expected = logits.clone()
    for index, bits in zip(indices, words.tolist(), strict=True):
        for token_id in range(vocab_size):
            if not bits[token_id // 32] >> (token_id % 32) & 1:
                expected[index, token_id] = -torch.inf
    apply_bitmask(logits, indices, torch.from_numpy(words))
    assert torch.equal(logits, expected)


def test_ids_beyond_the_tokenizer_are_never_allowed(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="(?s:.*)"))
    assert TOKENS - 70 > len(allowed_tokens(grammar)) > TOKENS - 170
    assert max(allowed_tokens(grammar)) < TOKENS


def test_the_builder_computes_what_fill_bitmask_does(compiler: GrammarCompiler) -> None:
    grammars = [compiler.compile(StructuredOutputsParams(regex=regex)) for regex in ("a+", "[0-9]{3}", "x|y")]
    builder = MaskBuilder(torch.device("cpu"))
    bitmask = builder.start(grammars).result()
    builder.close()
    assert torch.equal(bitmask, fill_bitmask(grammars))
    for grammar, mask in zip(grammars, bitmask, strict=True):
        alone = np.empty_like(mask.numpy())
        grammar.fill_mask(alone)
        assert alone.tolist() == mask.tolist()


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 1)])
def test_only_the_bitmask_of_a_gpu_is_pinned_and_by_a_thread_that_uses_it(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Pinned memory belongs to the context of the thread's current device, which would be GPU 0's."""
    used, pinned = [], []
    empty = torch.empty

    def record_pinned(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        pinned.append((pin_memory, threading.current_thread().name))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda of: used.append((of, threading.current_thread().name)))
    monkeypatch.setattr(torch, "empty", record_pinned)
    builder = MaskBuilder(device)
    builder.start([compiler.compile(StructuredOutputsParams(regex="a+"))]).result()
    builder.close()
    on_gpu = device.type == "cuda"
    assert pinned == [(on_gpu, "grammar-mask_0")]
    assert used == ([(device, "grammar-mask_0")] if on_gpu else [])

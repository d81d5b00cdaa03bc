"""Ties: choices of a reference model that rounding could turn, of experts, of tokens, and of what attention reads.

Where two experts, or two tokens, have nearly the same score, another order of the same sums may choose the other one,
and nothing is shown by a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

__all__ = ["require_no_ties"]

SMALLEST_GAP = 1e-5  # of an expert's score or a token's logit; float32 rounds scores of 1 by some 1e-7


def require_no_ties(model: PreTrainedModel, sequences: Iterable[torch.Tensor], first: int = 0) -> int:
    """Assert that no expert of a token, and no most likely token from position ``first`` on, is nearly another one.

    Returns:
        How many choices of experts there were.
    """
    with recorded_choices() as gaps, torch.inference_mode():
        logits = [model(tokens[None]).logits[0, first:] for tokens in sequences]
    assert min(gaps, default=1.0) > SMALLEST_GAP, "two experts, or two tokens of an indexer, have nearly the same score"
    best = torch.cat(logits).topk(2, dim=-1).values
    assert float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "two tokens have nearly the same logit"
    return len(gaps)


@contextmanager
def recorded_choices() -> Iterator[list[float]]:
    """Yield a list to which every ``torch.topk`` adds how far the last chosen score is from the first one left out.

    The routers of transformers choose their experts with it, and indexers of sparse attention the tokens that it reads.
    """
    gaps: list[float] = []
    topk = torch.topk

    def recording(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if 0 < k < scores.shape[-1]:
            best = topk(scores.float(), k + 1, dim=-1).values
            gaps.append(float((best[..., k - 1] - best[..., k]).nan_to_num(nan=math.inf).min()))  # two are masked
        return topk(scores, k, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "topk", recording)
        patched.setattr(torch.Tensor, "topk", recording)
        yield gaps

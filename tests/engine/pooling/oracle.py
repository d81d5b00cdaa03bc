"""The oracle: transformers' own classes, one text at a time or padded, with the pooling that sbert.net documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

__all__ = ["classifier_logits", "config_json", "dense", "vectors", "yes_probabilities"]


def _padded(texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), longest, dtype=torch.long), torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return ids, mask


@torch.inference_mode()
def vectors(path: Path, texts: Sequence[Sequence[int]], pooling: str, *, padded: bool = False) -> torch.Tensor:
    """Return the vectors before a dense layer and normalisation."""
    model = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    batches = [texts] if padded else [[text] for text in texts]
    results = []
    for batch in batches:
        ids, mask = _padded(batch)
        if model.config.model_type in ("roberta", "xlm-roberta"):
            ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
        hidden = model(input_ids=ids, attention_mask=mask)[0]
        results += [_pooled(row, kept, pooling) for row, kept in zip(hidden, mask, strict=True)]
    return torch.stack(results)


def _pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    kept = mask[:, None].float()
    if pooling == "cls_token":
        return hidden[0]
    if pooling == "lasttoken":
        return hidden[int(mask.sum()) - 1]
    if pooling == "max_tokens":
        return hidden.masked_fill(kept == 0, -1e9).max(dim=0).values
    if pooling == "mean_sqrt_len_tokens":
        return (hidden * kept).sum(dim=0) / kept.sum().sqrt()
    if pooling == "weightedmean_tokens":
        weights = torch.arange(1, len(mask) + 1)[:, None] * kept
        return (hidden * weights).sum(dim=0) / weights.sum()
    return (hidden * kept).sum(dim=0) / kept.sum()


def dense(path: Path, rows: torch.Tensor) -> torch.Tensor:
    """Return what the dense layer of a checkpoint makes of vectors."""
    weights = load_file(str(path / "2_Dense" / "model.safetensors"))
    return torch.tanh(rows @ weights["linear.weight"].T + weights["linear.bias"])


@torch.inference_mode()
def classifier_logits(path: Path, encoded: Sequence[Any]) -> torch.Tensor:
    """Return the logits of texts or pairs as transformers' tokenizer has encoded them."""
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    takes_types = model.config.model_type == "bert"
    rows = []
    for item in encoded:
        inputs = {name: torch.tensor([item[name]]) for name in ("input_ids", "attention_mask")}
        if takes_types:
            inputs["token_type_ids"] = torch.tensor([item["token_type_ids"]])
        rows.append(model(**inputs).logits[0])
    return torch.stack(rows)


@torch.inference_mode()
def yes_probabilities(path: Path, texts: Sequence[Sequence[int]], no: int, yes: int) -> torch.Tensor:
    """Return the probability of "yes" against "no" as the next token, as Qwen3-Reranker's model card computes it."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    scores = []
    for text in texts:
        logits = model(input_ids=torch.tensor([text])).logits[0, -1]
        scores.append(torch.log_softmax(logits[[no, yes]], dim=0)[1].exp())
    return torch.stack(scores)


def config_json(path: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json."""
    content: dict[str, Any] = json.loads((path / "config.json").read_text())
    return content

"""What becomes of the hidden states of one text: a vector, the logits of a classifier, or a reranker's answer.

A head gets one text at a time, so that its result does not depend on which texts were computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from engine.errors import ModelLoadError, shown
from engine.pooling.params import PoolingParams

__all__ = ["ClassifierHead", "EmbeddingHead", "Head", "YesNoHead", "activation_of", "pooled"]

Activation = Callable[[torch.Tensor], torch.Tensor]


def pooled(hidden: torch.Tensor, kind: str) -> torch.Tensor:
    """Return one vector [hidden_size] for the hidden states [num_tokens, hidden_size] of a text, both float32.

    The kinds are those of sentence-transformers' Pooling module.
    """
    num_tokens = len(hidden)
    if kind == "cls":
        return hidden[0]
    if kind == "last":
        return hidden[-1]
    if kind == "max":
        return hidden.amax(dim=0)
    if kind == "weighted_mean":  # later tokens count more: Muennighoff, SGPT (2022)
        weights = torch.arange(1, num_tokens + 1, dtype=hidden.dtype, device=hidden.device)
        return (hidden * weights[:, None]).sum(dim=0) / weights.sum()
    total = hidden.sum(dim=0)
    if kind == "mean":
        return total / num_tokens
    assert kind == "mean_sqrt_len"
    return total / math.sqrt(num_tokens)


class Head:
    """Maps the hidden states of one text to its result.

    Attributes:
        dimensions: length of the result, if it is not cut.
    """

    dimensions: int

    def __call__(self, hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the result, float32, for hidden states [num_tokens, hidden_size]."""
        raise NotImplementedError


class EmbeddingHead(Head):
    """Pools, applies dense layers, cuts and normalises.

    Args:
        kinds: of the vectors that are joined.
        dense: float32 layers, each with its activation.
        dimensions: length of the result.
        normalize: whether a vector has the length 1, if the request does not say.
    """

    def __init__(
        self, kinds: Sequence[str], dense: Sequence[tuple[nn.Module, Activation]], dimensions: int, *, normalize: bool
    ) -> None:
        self._kinds = kinds
        self._dense = dense
        self._normalize = normalize
        self.dimensions = dimensions

    def __call__(self, hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        hidden = hidden.float()
        vector = torch.cat([pooled(hidden, kind) for kind in self._kinds])
        for layer, activation in self._dense:
            vector = activation(layer(vector[None])[0])
        if params.dimensions is not None:
            vector = vector[: params.dimensions]
        normalize = self._normalize if params.normalize is None else params.normalize
        return F.normalize(vector, dim=0) if normalize else vector


class ClassifierHead(Head):
    """The head of a ``...ForSequenceClassification`` of an encoder.

    Args:
        model: of transformers, whose backbone computes the hidden states.
        activation: maps logits to scores.
    """

    def __init__(self, model: Any, activation: Activation) -> None:
        self._model = model
        self._activation = activation
        self.dimensions = model.config.num_labels

    def __call__(self, hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        logits = self._logits(hidden).float()
        return self._activation(logits) if params.activation else logits

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        model, first = self._model, hidden[None, :1]  # [1, 1, hidden_size]
        kind = model.config.model_type
        if kind == "bert":
            logits = model.classifier(model.bert.pooler(first))
        elif kind == "modernbert":
            whole = pooled(hidden, model.config.classifier_pooling)[None]
            logits = model.classifier(model.head(whole))
        else:
            logits = model.classifier(first)  # RoBERTa's takes the first token itself
        result: torch.Tensor = logits[0]
        return result


class YesNoHead(Head):
    """The probability of "yes" against "no" as the next token of a language model.

    Args:
        rows: the weights of the language model's head for "no" and "yes", as a layer with two outputs.
    """

    dimensions = 1

    def __init__(self, rows: nn.Module) -> None:
        self._rows = rows

    def __call__(self, hidden: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        logits: torch.Tensor = self._rows(hidden[-1:]).float()[0]
        logit = logits[1:] - logits[:1]  # the softmax over two logits is the sigmoid of their difference
        return logit.sigmoid() if params.activation else logit


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=0)


def activation_of(config_json: dict[str, Any], num_labels: int) -> Activation:
    """Return what maps a classifier's logits to scores: as its config.json says, else sigmoid or softmax.

    Raises:
        ModelLoadError: for an activation that is not served.
    """
    ours = config_json.get("sentence_transformers")
    named = ours.get("activation_fn") if isinstance(ours, dict) else None
    named = named or config_json.get("sbert_ce_default_activation_function")
    if named is not None:
        known: dict[str, Activation] = {"Sigmoid": torch.sigmoid, "Identity": torch.clone, "Softmax": _softmax}
        if (name := str(named).rpartition(".")[2]) not in known:
            raise ModelLoadError(f"config.json has the activation {shown(named)}; {', '.join(known)} are served")
        return known[name]
    is_single = num_labels > 1 and config_json.get("problem_type") != "multi_label_classification"
    return _softmax if is_single else torch.sigmoid

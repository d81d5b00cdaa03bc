"""The architectures that are served as embedding models and as rerankers.

Each is here because tests/engine/pooling compares its vectors or scores with those of transformers' own classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelLoadError

__all__ = ["POOLED", "PooledArchitecture", "architecture_of"]

_SEE = "docs/embeddings.md lists what is served"


@dataclass(frozen=True, slots=True)
class PooledArchitecture:
    """How a family is computed.

    Attributes:
        is_encoder: its tokens attend in both directions, and it has a token for the whole text (CLS).
        has_token_types: it distinguishes the two texts of a pair.
        counts_after_padding: its first position is the padding token's id + 1, as RoBERTa's.
        is_classifier: it has a head that scores.
        answers_yes_or_no: it is a language model; as a reranker its score is the probability of "yes" against "no".
    """

    is_encoder: bool = False
    has_token_types: bool = False
    counts_after_padding: bool = False
    is_classifier: bool = False
    answers_yes_or_no: bool = False


_BERT = {"is_encoder": True, "has_token_types": True}
_ROBERTA = {"is_encoder": True, "counts_after_padding": True}
_MODERN = {"is_encoder": True}

POOLED: dict[str, PooledArchitecture] = {
    "BertModel": PooledArchitecture(**_BERT),
    "BertForMaskedLM": PooledArchitecture(**_BERT),
    "BertForSequenceClassification": PooledArchitecture(**_BERT, is_classifier=True),
    "RobertaModel": PooledArchitecture(**_ROBERTA),
    "RobertaForMaskedLM": PooledArchitecture(**_ROBERTA),
    "RobertaForSequenceClassification": PooledArchitecture(**_ROBERTA, is_classifier=True),
    "XLMRobertaModel": PooledArchitecture(**_ROBERTA),
    "XLMRobertaForMaskedLM": PooledArchitecture(**_ROBERTA),
    "XLMRobertaForSequenceClassification": PooledArchitecture(**_ROBERTA, is_classifier=True),
    "ModernBertModel": PooledArchitecture(**_MODERN),
    "ModernBertForMaskedLM": PooledArchitecture(**_MODERN),
    "ModernBertForSequenceClassification": PooledArchitecture(**_MODERN, is_classifier=True),
    "NomicBertModel": PooledArchitecture(**_BERT),
    "Qwen2Model": PooledArchitecture(),
    "Qwen2ForCausalLM": PooledArchitecture(),
    "Qwen3Model": PooledArchitecture(),
    "Qwen3ForCausalLM": PooledArchitecture(answers_yes_or_no=True),
    "MistralModel": PooledArchitecture(),
    "MistralForCausalLM": PooledArchitecture(),
    "LlamaModel": PooledArchitecture(),
    "LlamaForCausalLM": PooledArchitecture(),
}


def architecture_of(name: str, task: str) -> PooledArchitecture:
    """Return how an architecture is computed.

    Raises:
        ModelLoadError: if it is not served for ``task``.
    """
    known = POOLED.get(name)
    if known is None:
        raise ModelLoadError(f"architecture '{name}' is not served with task: {task}; {_SEE}")
    scores = known.is_classifier or known.answers_yes_or_no
    if task == "score" and not scores:
        raise ModelLoadError(f"architecture '{name}' has no head that scores; set task: embed, or {_SEE}")
    if task == "embed" and known.is_classifier:
        raise ModelLoadError(f"architecture '{name}' is a classifier; set task: score")
    return known

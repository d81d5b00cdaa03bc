"""unneeded_biases: biases that AutoGPTQ writes for layers without any."""

from __future__ import annotations

from collections.abc import Iterable

from engine.models.checkpoint.checkpoint import Checkpoint

__all__ = ["unneeded_biases"]


def unneeded_biases(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Return those of ``names``, which a model has no use for, that are zero everywhere and beside a quantised weight.

    The layer's output is the same without them.

    Raises:
        ModelLoadError: if a file cannot be read.
    """
    return {name for name in names if _is_zero_bias(checkpoint, name)}


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    module, _, kind = name.rpartition(".")
    weight = f"{module}.weight"
    if kind != "bias" or name not in checkpoint or weight not in checkpoint or not checkpoint.is_packed(weight):
        return False
    return checkpoint.shape_of(name) == checkpoint.shape_of(weight)[:1] and not checkpoint.read(name).any()

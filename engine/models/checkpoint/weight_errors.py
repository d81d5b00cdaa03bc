"""weights_not_finite: the error about NaN or infinite weights, which names the file and the tensor that has them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import Checkpoint
from engine.models.checkpoint.finite import is_finite
from engine.models.checkpoint.stored_parts import Part

__all__ = ["weights_not_finite"]


def weights_not_finite(checkpoint: Checkpoint, name: str, parts: Iterable[Part], dtype: torch.dtype) -> ModelLoadError:
    """Return the error about a parameter that has become NaN or infinite, with the stored tensor that caused it.

    Args:
        checkpoint: is still open.
        name: of the parameter, named if no tensor explains it.
        parts: of stored tensors, which may be the cause.
        dtype: what they were converted to.
    """
    for part in parts:
        stored_name = part.name
        if not checkpoint.has_floats(stored_name):
            continue
        stored = checkpoint.read(stored_name, part.shard)
        where = f"'{stored_name}' of '{checkpoint.file_of(stored_name)}' has"
        if not is_finite(stored):
            return ModelLoadError(f"{where} {_examples(stored, stored)} that are not finite; download the file again")
        if not is_finite(converted := stored.to(dtype)):
            return ModelLoadError(
                f"{where} {_examples(converted, stored)} that are too large for {str(dtype).removeprefix('torch.')}; "
                "set dtype to bfloat16 or float32"
            )
    return ModelLoadError(
        f"'{name}' of '{checkpoint.path}' is not finite as {str(dtype).removeprefix('torch.')}; "
        "download the checkpoint again, or set dtype to float32"
    )


def _examples(x: torch.Tensor, shown: torch.Tensor) -> str:
    """Return how many elements of ``x`` are not finite, and what ``shown`` has at the first of them."""
    bad = (~x.isfinite()).nonzero()
    return f"{len(bad)} weights ({shown[tuple(bad[0])].item()} at {bad[0].tolist()} for one)"

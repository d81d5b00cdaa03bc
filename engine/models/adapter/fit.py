"""require_fit: checks that a checkpoint has the tensors that transformers' modules need, before any tensor is read.

transformers renames, joins and splits stored tensors differently for each architecture. So its loader itself is run, on
tensors without memory: what it finds missing, unexpected or of another shape does not fit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import Checkpoint
from engine.models.checkpoint.unneeded_bias import unneeded_biases
from engine.models.garbage import without_garbage_collection

__all__ = ["loading_in_order", "progress_bars", "read_dtype", "require_fit"]

_MAX_FURTHER = 64
_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"


def require_fit(
    model: Any, checkpoint: Checkpoint, dtype: torch.dtype, *, has_others: bool = False, may_lack: str | None = None
) -> list[str]:
    """Check the names, shapes and dtypes in the files' headers; return the tensors that will be read, in order.

    Call it before memory is allocated for a model: transformers' loader takes it, and fills it with random numbers, for
    what is missing or has another shape.

    Args:
        model: of transformers, on the meta device; do not use it afterwards.
        checkpoint: is open.
        dtype: that the weights will have.
        has_others: whether the checkpoint has tensors of other models, too.
        may_lack: the beginning of the names of tensors that may be missing.

    Raises:
        ModelLoadError: if tensors are missing, unexpected, or of another shape or dtype.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # slow to import
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    order: list[str] = []
    headers = {name: _Header(checkpoint, name, order, dtype) for name in checkpoint.names}
    # The collector would walk through the objects of all stored tensors again and again.
    with progress_bars(False), loading_in_order(), without_garbage_collection():
        loading, _ = convert_and_load_state_dict_in_model(model, headers, config)
    model._adjust_missing_and_unexpected_keys(loading)
    ties: dict[str, str] = model.all_tied_weights_keys
    stored_as_tied = {source for tied, source in ties.items() if tied not in loading.missing_keys}
    for name in order:
        checkpoint.require_floats(name)
    missing = loading.missing_keys - ties.keys() - stored_as_tied
    missing = {name for name in missing if may_lack is None or not name.startswith(may_lack)}
    _refuse(checkpoint, dict.fromkeys(missing, "is missing"))
    if not has_others:
        _refuse(checkpoint, dict.fromkeys(_unexpected(model, checkpoint, loading.unexpected_keys), "is unexpected"))
    shapes = {name: (list(stored), list(needed)) for name, stored, needed in loading.mismatched_keys}
    _refuse(checkpoint, {name: f"has shape {pair[0]} instead of {pair[1]}" for name, pair in shapes.items()})
    _refuse(checkpoint, dict.fromkeys(loading.conversion_errors, "cannot be joined from the stored tensors"))
    return order


def _unexpected(model: Any, checkpoint: Checkpoint, names: set[str]) -> set[str]:
    """Return those of some stored tensors that the model does not need and that are not known to be superfluous."""
    unexpected = {name for name in names if not name.startswith(_further_layers(model.config))}
    return unexpected - unneeded_biases(checkpoint, unexpected)


def read_dtype(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is read: its own, or that of the model if it is dequantised."""
    return dtype if checkpoint.is_packed(name) else checkpoint.dtype_of(name)


def _further_layers(config: Any) -> tuple[str, ...]:
    """Return the beginnings of the names of layers that predict further tokens (MTP), which follow the last layer."""
    count = getattr(config, "num_mtp_layers", None) or getattr(config, "num_nextn_predict_layers", None)
    if type(count) is not int:
        return ()
    return tuple(f"model.layers.{config.num_hidden_layers + index}." for index in range(min(count, _MAX_FURTHER)))


@contextmanager
def loading_in_order() -> Iterator[None]:
    """Let transformers' loader take each tensor when it needs it, not all of them ahead on its threads.

    The loader copies the converter of each stored tensor, but needs only the first copy of each parameter. With
    thousands of experts the copies take most of its time, so unused copies are reused.
    """
    from transformers import core_model_loading  # slow to import

    before = os.environ.get(_IN_ORDER)
    os.environ[_IN_ORDER] = "1"
    core_model_loading.deepcopy = _Copies()
    try:
        yield
    finally:
        core_model_loading.deepcopy = copy.deepcopy
        del os.environ[_IN_ORDER]
        if before is not None:
            os.environ[_IN_ORDER] = before


@contextmanager
def progress_bars(show: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars in the ``with``."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    if not show:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()


class _Copies:
    """Deep copies of converters of transformers; a copy that has collected no tensor was not kept, and is reused."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Any, Any]] = {}  # by the converter's id: the converter, kept alive, and a copy

    def __call__(self, converter: Any) -> Any:
        _, last = self._last.get(id(converter), (None, None))
        if last is None or last.collected_tensors or last.layer_targets:
            last = copy.deepcopy(converter)
            self._last[id(converter)] = converter, last
        return last


def _refuse(checkpoint: Checkpoint, problems: dict[str, str]) -> None:
    """Raise ModelLoadError if there are problems, by the name of the tensor as transformers names it."""
    if problems:
        name = min(problems)
        where = f" of '{checkpoint.file_of(name)}'" if name in checkpoint else ""
        others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ModelLoadError(
            f"checkpoint '{checkpoint.path}' does not fit its {checkpoint.description}: '{name}'{where} "
            f"{problems[name]}{others}; {checkpoint.remedy}"
        )


class _Header:
    """A tensor without memory, with the shape and dtype of one that is read. It notes when it is taken."""

    def __init__(self, checkpoint: Checkpoint, name: str, order: list[str], dtype: torch.dtype) -> None:
        self._name, self._order = name, order
        self._shape = checkpoint.shape_of(name)
        self._dtype = read_dtype(checkpoint, name, dtype) if checkpoint.has_floats(name) else torch.float32

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        self._order.append(self._name)
        return torch.empty(self._shape, dtype=self._dtype, device="meta")

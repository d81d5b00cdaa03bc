"""The implementations of the operations, each where it can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch

from kernels.cpu.library import library
from kernels.recurrent.base import RecurrentOps
from kernels.recurrent.reference import ReferenceOps
from kernels.recurrent_metadata import RecurrentMetadata


class OnDevice:
    """Operations on a GPU for tests whose tensors are on the host: arguments are copied there and back."""

    def __init__(self, ops: RecurrentOps, device: torch.device) -> None:
        self._ops, self._device = ops, device

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **options: Any) -> torch.Tensor:
            moved = [self._moved(value) for value in args]
            output: torch.Tensor = getattr(self._ops, name)(*moved, **options)
            for ours, theirs in zip(args, moved, strict=True):
                if isinstance(ours, torch.Tensor):
                    ours.copy_(theirs)  # a state has changed
            return output.cpu()

        return call

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._device)
        if isinstance(value, RecurrentMetadata):
            return replace(value, **{field.name: self._moved(getattr(value, field.name)) for field in fields(value)})
        return value


@pytest.fixture(params=["reference", "c", "triton"])
def ops(request: pytest.FixtureRequest) -> RecurrentOps:
    match request.param:
        case "c":
            if library() is None:
                pytest.skip("no C compiler is installed")
            from kernels.recurrent.c_ops import COps

            return COps()
        case "triton":
            device = request.getfixturevalue("kernel_device")
            from kernels.recurrent.triton.ops import TritonOps

            return cast(RecurrentOps, OnDevice(TritonOps(), device)) if device.type == "cuda" else TritonOps()
    return ReferenceOps()

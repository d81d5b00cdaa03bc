"""LinearMethod: how linear layers keep their weights and multiply with them. registry.py lists the methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

__all__ = ["LinearMethod"]


class LinearMethod(ABC):
    """One line of the table in registry.py, for weights of one dtype.

    Args:
        dtype: of the weights as they are loaded.

    Attributes:
        name: its key in the table.
        why_chosen: why `select_linear_method` chose it, and why the methods before it cannot run.
    """

    name: ClassVar[str]
    why_chosen: str = ""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @classmethod
    def why_unusable(cls) -> str | None:
        """Return why the method cannot run on this machine; None if it can."""
        return None

    @abstractmethod
    def layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer that computes ``linear``, [..., in_features] to [..., out_features], by this method.

        Its weights are parameters, so that they count as the model's memory.
        """

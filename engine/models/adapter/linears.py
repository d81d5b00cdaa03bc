"""The linear layers of transformers' modules, by the linear method of each.

They take most of a step on a CPU, where the C kernels multiply them and give a row the same bits in every batch.
"""

from __future__ import annotations

from torch import nn

from kernels.linear.select import select_linear_method

__all__ = ["pack_linears"]


def pack_linears(model: nn.Module) -> None:
    """Let the C kernels compute the linear layers of ``model`` that they can, if this machine can compile them.

    Classes derived from ``nn.Linear`` stay: they compute something else.
    """
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, select_linear_method(child.weight.device, child.weight.dtype).layer(child))
        else:
            pack_linears(child)

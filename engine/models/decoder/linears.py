"""The linear method of our own decoder: its choice, and the layers that compute with it.

With the option ``batch_invariant`` a token's logits have the same bits alone and in any batch: attention, experts and
sampling always have this property where the Triton kernels compute them. A sequence that computes one token in a step
(a decode) gets other bits than in a chunk of several tokens, because its context is split. On a CPU the C kernels give
the same bits in every case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.errors import ConfigError
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.parallel_layers import RowParallelLinear
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import CodedWeight
from kernels.linear.base import LinearMethod
from kernels.linear.select import select_linear_method

if TYPE_CHECKING:
    from kernels.linear.coded_triton import CodedTritonLinear
    from kernels.linear.fp8_triton import Fp8Linear

    CodedLinear = CodedTritonLinear | Fp8Linear

__all__ = ["CodedLinear", "choose_linear_method", "coded_layer", "prepare_coded", "replace_linears"]


def choose_linear_method(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int,
    *,
    quantization: str | None = None,
    batch_invariant: bool = False,
    may_pack: bool,
) -> LinearMethod:
    """Return how the linear layers of a model are computed.

    Args:
        config: the whole model's shape.
        dtype: of the weights.
        device: of the weights.
        num_ranks: of the tensor-parallel group.
        quantization: the engine's option.
        batch_invariant: the engine's option.
        may_pack: whether the C kernels may compute the model.

    Raises:
        ConfigError: if experts cannot be quantized here, or the model cannot be batch-invariant here.
    """
    needed = {"experts": config.experts is not None, "batch_invariant": batch_invariant}
    options = frozenset(name for name, is_needed in needed.items() if is_needed)
    if batch_invariant and device.type != "cpu" and num_ranks > 1:
        raise _not_invariant(
            f"is not possible with tensor_parallel_size={num_ranks} on GPUs, whose sums depend on their size"
        )
    if batch_invariant and device.type != "cpu" and config.latent is not None:
        raise _not_invariant(
            "is not possible for latent attention on GPUs, whose products of heads depend on the batch"
        )
    if batch_invariant and device.type != "cpu" and config.altup is not None:
        raise _not_invariant(
            "is not possible for several residual streams on GPUs, whose coefficients depend on the batch"
        )
    try:
        return select_linear_method(device, dtype, quantization, options, may_pack=may_pack)
    except ValueError as error:
        if quantization is not None and (config.experts is not None or not batch_invariant):
            condition = " if a model has experts" if quantization == "int8" else ""
            raise ConfigError(
                f"is computed only by the C kernels on a CPU{condition}, which cannot compute this model here",
                param="quantization",
                value=quantization,
                remedy="leave it out",
            ) from error
        raise _not_invariant(
            "needs the C kernels on a CPU, which cannot compute this model, its dtype, or on this machine"
        ) from error


def _not_invariant(reason: str) -> ConfigError:
    return ConfigError(reason, param="batch_invariant", value=True, remedy="leave it out")


def coded_layer(
    plain: nn.Linear | nn.Embedding, weight: CodedWeight, device: torch.device, *, batch_invariant: bool
) -> CodedLinear:
    """Return what computes ``plain``, whose own weight may be on the meta device, from codes; it has no bias yet.

    Layers whose scheme quantises activations do so too, where a GPU multiplies FP8.
    """
    from kernels.linear.coded_triton import CodedTritonLinear  # a CPU needs no Triton
    from kernels.linear.fp8_triton import Fp8Linear, can_multiply_fp8

    if isinstance(plain, nn.Linear) and can_multiply_fp8(weight, device):
        return Fp8Linear(weight, len(plain.weight), device, batch_invariant=batch_invariant)
    return CodedTritonLinear(weight, len(plain.weight), device, batch_invariant=batch_invariant)


def prepare_coded(layers: Collection[CodedLinear], dtype: torch.dtype, device: torch.device) -> None:
    """Give layers on codes the memory in which the weights of many rows are decoded, and compile their kernels.

    A step may have any number of rows, and must not wait for a compilation. The layers of a model share the memory.

    Args:
        layers: of one model.
        dtype: of activations.
        device: of the layers.
    """
    if not layers:
        return
    from kernels.linear.coded_decode import scratch_of  # a CPU needs no Triton
    from kernels.linear.coded_triton import CodedTritonLinear

    decoded = [layer for layer in layers if isinstance(layer, CodedTritonLinear) and not layer.batch_invariant]
    shapes = [(layer.out_features, layer.in_features) for layer in decoded]
    scratch = scratch_of(shapes, dtype, device) if shapes else None
    for own in decoded:
        own.scratch = scratch
    for layer in layers:
        layer.compile_kernels(dtype)


def replace_linears(
    model: nn.Module, method: LinearMethod, coded: Mapping[nn.Module, CodedLinear] | None = None
) -> None:
    """Let ``method`` compute every linear layer of ``model``, but for those whose weights stay codes.

    Args:
        model: whose layers are replaced.
        method: of the layers with weights.
        coded: what computes the other layers, by these; it gets their biases.
    """
    for name, child in model.named_children():
        if not isinstance(child, nn.Linear):
            replace_linears(child, method, coded)
            continue
        if isinstance(child, RowParallelLinear) and child.parallel.rank > 0:
            child.register_parameter("bias", None)  # the ranks' outputs are summed
        layer: nn.Module
        if coded is not None and child in coded:
            own = coded[child]
            own.bias = child.bias
            layer = own
        else:
            layer = method.layer(child)
        if isinstance(child, RowParallelLinear) and child.parallel.size > 1 and layer is not child:
            layer = _SummedOverRanks(layer, child.parallel)
        setattr(model, name, layer)


class _SummedOverRanks(nn.Module):
    """A layer that reads its rank's input features, whose outputs the ranks sum."""

    def __init__(self, layer: nn.Module, parallel: TensorParallel) -> None:
        super().__init__()
        self._layer, self._parallel = layer, parallel

    def forward(self, own_features: torch.Tensor) -> torch.Tensor:
        """Map [num_tokens, in_features] to the whole [num_tokens, out_features]."""
        return self._parallel.all_reduce(self._layer(own_features))

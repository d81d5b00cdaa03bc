"""load_mtp_head: reads a checkpoint's layer of multi-token prediction into a CpuMtpHead."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.stored_parts import EMBEDDING, HEAD
from engine.models.checkpoint.weights import read_weights, require_parameters
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.coded_plan import plan_codes
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.linears import choose_linear_method
from engine.models.decoder.loader import Uninitialised, plan_of, shapes_of
from engine.models.mtp.cpu_mtp_head import CpuMtpHead, own_shapes
from engine.models.mtp.mtp_config import format_of, mtp_config
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.select import select_layer_ops
from kernels.linear.packed import PackedLinears
from kernels.linear.registry import DEQUANTIZE

__all__ = ["count_mtp_layers", "load_mtp_head"]


def count_mtp_layers(path: str | Path, config: ModelConfig) -> int:
    """Return how many layers of multi-token prediction a checkpoint stores.

    Args:
        path: of a directory.
        config: of the model, whose family has such layers.

    Raises:
        ModelLoadError: if the checkpoint cannot be opened.
    """
    with open_checkpoint(path, has_mtp=True) as checkpoint:
        count = 0
        while _has_layer(checkpoint, config, count):
            count += 1
    return count


def _has_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> bool:
    form = format_of(config)
    start = f"{form.prefix}{form.layer_name(config.num_layers, index)}."
    return any(name.startswith(start) for name in checkpoint.names)


def load_mtp_head(
    path: str | Path, target: CpuDecoder, *, dtype: torch.dtype, quantization: str | None = None
) -> CpuMtpHead:
    """Load the first layer of multi-token prediction that a checkpoint stores beside the model ``target``.

    Args:
        path: of the checkpoint's directory.
        target: the model, loaded, without other ranks.
        dtype: of weights and KV cache.
        quantization: as of ``load_decoder``.

    Raises:
        ModelLoadError: if tensors are missing, of another shape than the config says, or not finite.
    """
    config, form = mtp_config(target.config), format_of(target.config)
    parallel, cpu = TensorParallel(), torch.device("cpu")
    keeps_codes, quantization = quantization is None, None if quantization == DEQUANTIZE else quantization
    method = choose_linear_method(config, dtype, cpu, 1, quantization=quantization, may_pack=True)
    assert isinstance(method, PackedLinears)
    with torch.device("meta"), Uninitialised():
        shapes = shapes_of(Decoder(config, (), parallel, select_layer_ops(cpu)))
    del shapes[EMBEDDING], shapes[HEAD]  # those of the model
    with open_checkpoint(path, has_mtp=True) as checkpoint:
        all_shapes = {**shapes, **own_shapes(config.hidden_size)}
        parameters = require_parameters(checkpoint, all_shapes, config, parallel, dtype, has_others=True)
        make_plan = partial(plan_codes, shapes, checkpoint, config, parallel)
        plan = plan_of(method, shapes, make_plan if keeps_codes else None, is_head_embedding=False)
        head = CpuMtpHead(target, config, dtype, method.kind, hidden_first=form.hidden_first, plan=plan)
        # All are copied.
        for name, weight in read_weights(checkpoint, parameters, cpu, may_be_mapped=lambda _: False, is_coded=plan.has):
            head.set_weight(name, weight)
    return head

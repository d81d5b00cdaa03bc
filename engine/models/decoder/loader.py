"""load_decoder: reads a checkpoint directory into a Decoder or CpuDecoder, with its weights on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.stored_parts import EMBEDDING, HEAD, LAYER_EMBEDDING
from engine.models.checkpoint.weights import read_weights, require_parameters, with_stored_head
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.attention import Attention
from engine.models.decoder.coded_plan import NO_CODES, CodedPlan, plan_codes, plan_quantization
from engine.models.decoder.cpu_decoder import CpuDecoder, head_is_embedding
from engine.models.decoder.cpu_decoder import can_run as cpu_kernels_can_run
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.experts import Experts, SparseMoeBlock
from engine.models.decoder.linears import choose_linear_method, coded_layer, prepare_coded, replace_linears
from engine.models.decoder.parallel_layers import CodedVocabEmbedding, VocabParallelEmbedding
from engine.models.decoder.rope import rope_tables
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import CodedWeight, Weight
from kernels.cpu.linear import WeightKind
from kernels.layer_ops.select import select_layer_ops
from kernels.linear.packed import PackedInt4Linears, PackedLinears
from kernels.linear.registry import DEQUANTIZE
from kernels.recurrent.select import select_recurrent_ops

if TYPE_CHECKING:
    from engine.models.decoder.linears import CodedLinear
    from kernels.linear.coded_triton import CodedTritonLinear

__all__ = ["Uninitialised", "load_decoder", "plan_of", "shapes_of"]

Weights = Iterable[tuple[str, Weight]]

logger = logging.getLogger(__name__)

_KEPT_DEQUANTISED = "layers of their kind are computed dequantised here"


def load_decoder(
    path: str | Path,
    hf_config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    parallel: TensorParallel,
    quantization: str | None = None,
    batch_invariant: bool = False,
    use_cpu_kernels: bool = True,
    has_fp8_cache: bool = False,
    show_progress: bool = False,
) -> Decoder | CpuDecoder:
    """Build the model that ``hf_config`` describes and fill it from the directory's safetensors.

    Args:
        quantization: ``int8`` and ``int4`` quantize linear layers while loading; ``dequantize`` keeps no codes of a
            quantised checkpoint.
        batch_invariant: whether a token's logits must have the same bits in any batch.
        use_cpu_kernels: whether the C kernels may compute the model, attention included; compiles them if necessary.
        has_fp8_cache: whether keys and values are cached in FP8, with the checkpoint's scales.
        show_progress: show a bar on stderr if that is a terminal, else log the progress of a load that takes long.

    Returns:
        The model for the C kernels if they can run it on this device, else the one for torch's operators.

    Raises:
        ModelLoadError: if tensors are missing, unexpected, of another shape than the config says, or not finite.
        ConfigError: if the ranks cannot share the model evenly, experts cannot be quantized here, the model cannot be
            batch-invariant here, or the context is too long for a RoPE table.
    """
    config, started = ModelConfig.from_hf(hf_config), perf_counter()
    keeps_codes, quantization = quantization is None, None if quantization == DEQUANTIZE else quantization
    with open_checkpoint(path) as checkpoint:
        config = with_stored_head(config, checkpoint, dtype)
        method = choose_linear_method(
            config,
            dtype,
            device,
            parallel.size,
            quantization=quantization,
            batch_invariant=batch_invariant,
            may_pack=use_cpu_kernels and cpu_kernels_can_run(config, dtype, device),
        )
        if parallel.rank == 0:
            logger.debug("Using %s linear layers (%s)", method.name, method.why_chosen)
        with torch.device("meta"), Uninitialised():
            recurrent_ops = select_recurrent_ops(device, batch_invariant=batch_invariant)
            skeleton = Decoder(config, (), parallel, select_layer_ops(device), recurrent_ops)
        shapes = shapes_of(skeleton)
        is_head = isinstance(method, PackedLinears) and head_is_embedding(config, parallel, method.kind)
        if is_head:
            del shapes[HEAD]  # the embedding is packed as the head
        parameters = require_parameters(checkpoint, shapes, config, parallel, dtype)
        rope = rope_tables(hf_config, config.rope, config.rope_widths, max_model_len)
        read = partial(read_weights, checkpoint, parameters, device, show_progress=show_progress)
        model: Decoder | CpuDecoder
        coded: dict[nn.Module, CodedLinear]
        plan, coded = NO_CODES, {}
        if isinstance(method, PackedLinears):
            assert isinstance(skeleton.embed_tokens, VocabParallelEmbedding)
            make_plan = partial(plan_codes, shapes, checkpoint, config, parallel)
            plan = plan_of(method, shapes, make_plan if keeps_codes else None, is_head_embedding=is_head)
            model = CpuDecoder(skeleton.embed_tokens, config, rope, parallel, dtype, method.kind, plan)
            mapped = {LAYER_EMBEDDING} if is_head else {LAYER_EMBEDDING, EMBEDDING}  # only some of their rows are read
            for name, weight in read(may_be_mapped=mapped.__contains__, is_coded=plan.has):
                model.set_weight(name, weight)
        else:
            model = skeleton
            model.rope = [table.to(device) for table in rope]
            if has_fp8_cache:
                _take_kv_scales(model, checkpoint)
            if keeps_codes and device.type == "cuda":
                plan = plan_codes(
                    _coded_shapes(model), checkpoint, config, parallel, is_embedding_coded=True, is_packed=False
                )
            coded = _fill(model, read(is_coded=plan.has), dtype, device, batch_invariant=batch_invariant)
            replace_linears(model, method, coded)
            model.eval()
        if parallel.rank == 0:
            why = _KEPT_DEQUANTISED if keeps_codes else "quantization says so"
            checkpoint.log_quantised(dtype, plan.stored, plan.reasons, why)
    logger.info("Loading weights took %.2f seconds", perf_counter() - started)
    prepare_coded(coded.values(), dtype, device)
    for block in model.modules() if isinstance(model, Decoder) else ():
        if isinstance(block, SparseMoeBlock):
            block.compile_kernels(dtype, device)
        elif isinstance(block, CodedVocabEmbedding):
            block.compile_kernels()
    return model


def _take_kv_scales(model: Decoder, checkpoint: Checkpoint) -> None:
    """Give the layers the checkpoint's scales of keys and values in FP8; a layer without one keeps 1."""
    scales, shared = checkpoint.kv_scales.read(), model.config.layer_heads.shared
    count = 0
    for index, layer in enumerate(model.layers):
        if isinstance(layer.self_attn, Attention) and (own := scales.get(shared.get(index, index))) is not None:
            layer.self_attn.kv_scales = own
            count += 1
    if model.parallel.rank == 0:
        logger.info("Keys and values are cached in FP8 (E4M3); the checkpoint has the scales of %d layers", count)


def plan_of(
    method: PackedLinears,
    shapes: dict[str, torch.Size],
    plan_stored: Callable[..., CodedPlan] | None,
    *,
    is_head_embedding: bool,
) -> CodedPlan:
    """Return which weights the C kernels compute as codes.

    Args:
        method: how weights are packed.
        shapes: of the parameters.
        plan_stored: `plan_codes` of the checkpoint; None: its codes are not kept.
        is_head_embedding: the embedding is read from the head's packed weights.
    """
    if plan_stored is not None:
        has_floats = method.kind is WeightKind.BFLOAT16
        return plan_stored(is_embedding_coded=is_head_embedding, has_floats=has_floats)
    if isinstance(method, PackedInt4Linears):
        return plan_quantization(shapes, method.bits, method.head_bits, is_head_embedding=is_head_embedding)
    return NO_CODES


def shapes_of(model: Decoder) -> dict[str, torch.Size]:
    """Return the shapes of a decoder's parameters, by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _coded_shapes(model: Decoder) -> dict[str, torch.Size]:
    """Return the shapes of the weights that a GPU can compute from their codes: layers, experts and the embedding."""
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | VocabParallelEmbedding):
            shapes[f"{name}.weight"] = module.weight.shape
        elif isinstance(module, Experts):
            shapes |= {f"{name}.{own}": stack.shape for own, stack in module.named_parameters()}
    return shapes


def _fill(
    model: Decoder, weights: Weights, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> dict[nn.Module, CodedLinear]:
    """Put the weights into the modules of a decoder on the meta device.

    Returns:
        What computes the linear layers whose weights stay codes, by these; their own weights stay on the meta device.
    """
    coded: dict[nn.Module, CodedLinear] = {}
    embedding = model.embed_tokens
    assert isinstance(embedding, VocabParallelEmbedding)
    for name, weight in weights:
        module, _, attribute = name.rpartition(".")
        parent, _, number = module.rpartition(".")
        experts = model.get_submodule(parent)
        if isinstance(experts, Experts):
            if isinstance(weight, CodedWeight):
                experts.set_codes(int(number), attribute, weight, device, batch_invariant=batch_invariant)
            else:
                experts.set_weight(int(number), attribute, weight)
        elif isinstance(weight, CodedWeight):
            layer = model.get_submodule(module)
            assert isinstance(layer, nn.Linear | VocabParallelEmbedding)
            if name == HEAD and model.config.tie_word_embeddings:
                coded[layer] = coded[embedding]
            else:
                coded[layer] = coded_layer(layer, weight, device, batch_invariant=batch_invariant)
        else:
            setattr(model.get_submodule(module), attribute, nn.Parameter(weight, requires_grad=False))
    if (codes := coded.pop(embedding, None)) is not None:
        model.embed_tokens = CodedVocabEmbedding(embedding, cast("CodedTritonLinear", codes), dtype)
    return coded


class Uninitialised(TorchFunctionMode):
    """A context in which new modules get no random weights: on the meta device those import torch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))

"""load_eagle3_head: reads the checkpoint of an EAGLE-3 head into a CpuEagle3Head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from engine.models.checkpoint.stored_parts import EMBEDDING, HEAD
from engine.models.checkpoint.weights import read_weights, require_parameters
from engine.models.config.model_config import ModelConfig
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.decoder.decoder import Decoder
from engine.models.decoder.linears import choose_linear_method
from engine.models.decoder.loader import Uninitialised, plan_of, shapes_of
from engine.models.decoder.rope import rope_tables
from engine.models.eagle3.cpu_eagle3_head import CpuEagle3Head, own_shapes
from engine.models.eagle3.eagle3_config import Eagle3Config, refused_head
from engine.models.tensor_parallel import TensorParallel
from kernels.layer_ops.select import select_layer_ops
from kernels.linear.packed import PackedLinears
from kernels.linear.registry import DEQUANTIZE

__all__ = ["load_eagle3_head", "require_eagle3_weights"]

OFFSETS = "d2t"  # offsets from the head's token ids to the model's


def require_eagle3_weights(path: str, config: Eagle3Config, num_aux: int) -> None:
    """Check that a checkpoint is of this EAGLE-3 head before the model is loaded; read no weights.

    Raises:
        ConfigError: if it is of another kind of head, or of a whole model.
        ModelLoadError: if it cannot be opened, or its projection or its head has other sizes than its config.
    """
    with open_checkpoint(path) as checkpoint:
        if "fc.weight" not in checkpoint:
            raise refused_head(path, "has no tensor 'fc.weight', so it is not a head", "choose draft_model for a model")
        width = checkpoint.shape_of("fc.weight")[-1:]
        if width == (2 * config.shape.hidden_size,) and num_aux != 2:
            raise refused_head(path, "is an EAGLE-1 or EAGLE-2 head: its 'fc.weight' reads one hidden state")
        shapes = own_shapes(config, num_aux)
        for name in ("fc.weight", HEAD):
            checkpoint.require(name, shapes[name])


def load_eagle3_head(
    path: str,
    config: Eagle3Config,
    target: CpuDecoder,
    num_aux: int,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    quantization: str | None = None,
) -> CpuEagle3Head:
    """Load a head that drafts for the model ``target``.

    Args:
        path: of the head's directory.
        config: which was read there.
        target: the model, loaded, without other ranks.
        num_aux: how many of a token's hidden states it reads.
        dtype: of weights and KV cache.
        max_model_len: tokens of the longest sequence.
        quantization: as of ``load_decoder``.

    Raises:
        ModelLoadError: if tensors are missing, of another shape than the config says, or not finite; or the head's
            tokens are not the model's.
    """
    parallel, cpu = TensorParallel(), torch.device("cpu")
    quantization = None if quantization == DEQUANTIZE else quantization
    method = choose_linear_method(config.shape, dtype, cpu, 1, quantization=quantization, may_pack=True)
    assert isinstance(method, PackedLinears)
    with torch.device("meta"), Uninitialised():
        shapes = shapes_of(Decoder(config.shape, (), parallel, select_layer_ops(cpu)))
    embedding = {EMBEDDING: shapes.pop(EMBEDDING)}
    shapes |= {name: torch.Size(shape) for name, shape in own_shapes(config, num_aux).items()}
    plan = plan_of(method, shapes, None, is_head_embedding=False)
    with open_checkpoint(path) as checkpoint:
        own = _stored_as(checkpoint, config)
        require = partial(require_parameters, checkpoint, parallel=parallel, dtype=dtype, has_others=True)
        parameters = require(shapes, config=replace(own, vocab_size=config.draft_vocab_size))
        if EMBEDDING in checkpoint or own.hidden_size != target.config.hidden_size:
            parameters += require(embedding, config=own)
        rope = rope_tables(config.hf_config, config.shape.rope, config.shape.rope_widths, max_model_len)
        head = CpuEagle3Head(target, config, rope, num_aux, dtype, method.kind, plan)
        # All others are copied.
        for name, weight in read_weights(checkpoint, parameters, cpu, may_be_mapped=EMBEDDING.__eq__):
            head.set_weight(name, weight)
        if (token_ids := _token_ids(checkpoint, config)) is not None:
            head.set_token_ids(token_ids)
    return head


def _stored_as(checkpoint: Checkpoint, config: Eagle3Config) -> ModelConfig:
    """Return the layer's shape with the name that the checkpoint has for it: EAGLE's, or that of speculators."""
    is_midlayer = any(name.startswith("midlayer.") for name in checkpoint.names)
    family = config.shape.family
    names = {**family.stored_names, "layers.0": "midlayer"} if is_midlayer else family.stored_names
    return replace(config.shape, family=replace(family, stored_names=names))


def _token_ids(checkpoint: Checkpoint, config: Eagle3Config) -> torch.Tensor | None:
    """Return the model's id of each token of the head's vocabulary; None if both have the same.

    Raises:
        ModelLoadError: if some are not tokens of the model, or two are the same.
    """
    own, size = config.draft_vocab_size, config.shape.vocab_size
    if OFFSETS not in checkpoint:
        if own == size:
            return None
        raise ModelLoadError(
            f"checkpoint '{checkpoint.path}' lacks the tensor '{OFFSETS}', which says which {own} of {size} tokens it "
            f"drafts (draft_vocab_size={own}); {checkpoint.remedy}"
        )
    token_ids = torch.arange(own) + checkpoint.read_integers(OFFSETS, [own])
    wrong = token_ids[(token_ids < 0) | (token_ids >= size)]
    if len(wrong):
        problem = f"the token {int(wrong[0])} of {size}"
    elif (counts := torch.bincount(token_ids)).max() > 1:
        problem = f"the token {int(counts.argmax())} twice"
    else:
        return token_ids
    raise ModelLoadError(f"'{OFFSETS}' of '{checkpoint.path}' names {problem}; {checkpoint.remedy}")

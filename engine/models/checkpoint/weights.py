"""require_parameters and read_weights: the parameters of our model in a checkpoint's tensors, read one at a time.

stored_parts.py says which tensors make up a parameter of ours. Every parameter must be found and every tensor used: a
checkpoint that does not match its config is rejected by the headers of its files, before anything is read and before
memory is allocated for the config's sizes. A tensor-parallel rank reads only its own part of each tensor, so no process
ever holds the whole model. Nothing here keeps a parameter that the caller has released.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import Checkpoint
from engine.models.checkpoint.expert_weights import unstack
from engine.models.checkpoint.files.read_ahead import read_ahead
from engine.models.checkpoint.finite import is_finite
from engine.models.checkpoint.formats.coded_reading import joined
from engine.models.checkpoint.own_memory import own_memory
from engine.models.checkpoint.progress import with_progress
from engine.models.checkpoint.sharding import Shard
from engine.models.checkpoint.stored_parts import (
    EMBEDDING,
    HEAD,
    Part,
    have_factors,
    stored_parts,
    stored_with_prefix,
    unread,
)
from engine.models.checkpoint.unneeded_bias import unneeded_biases
from engine.models.checkpoint.weight_errors import weights_not_finite
from engine.models.config.model_config import ModelConfig
from engine.models.tensor_parallel import TensorParallel
from kernels.coded_weight import CodedMatrix, Weight

__all__ = ["StoredParameter", "read_weights", "require_parameters", "with_stored_head"]

logger = logging.getLogger(__name__)

_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what the config implies
# Small ones, which are as exact as the files have them.
_FLOAT32 = (
    *(".A_log", ".dt_bias", ".D", ".expert_bias", ".expert_scale", ".indexer.weights_proj.weight"),
    *(".altup.router", ".altup.predictions", ".altup.corrections", ".altup.output_scale"),
)
_COMPARED_ROWS = 1024  # at once, so that a comparison takes little memory


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """One parameter of ours, and the stored tensors that make it up.

    Attributes:
        name: ours; of one of several stacked experts as ``unstack`` has it.
        shape: this rank's.
        dtype: in which it is read, unless it is read as codes.
        parts: where its numbers are; none: they are 1.
        is_tied_head: it is the embedding's tensor.
    """

    name: str
    shape: list[int]
    dtype: torch.dtype
    parts: list[Part]
    is_tied_head: bool = False

    def num_bytes(self, *, is_coded: bool) -> int:
        """Return the bytes of memory that it takes, of codes about."""
        return 0 if self.is_tied_head else math.prod(self.shape) * (1 if is_coded else self.dtype.itemsize)


def with_stored_head(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> ModelConfig:
    """Return the config, untied if the checkpoint stores a head that differs from the embedding in ``dtype``.

    Merged fine-tunes often store a trained head beside a config that still says ``tie_word_embeddings: true``.
    transformers computes with the stored head, too.
    """
    embedding = stored_with_prefix(EMBEDDING, checkpoint, config)
    if not (config.tie_word_embeddings and HEAD in checkpoint and embedding in checkpoint):
        return config
    for name in (HEAD, embedding):
        checkpoint.require_floats(name)
    if _are_equal(checkpoint, HEAD, embedding, dtype):
        return config
    logger.warning(
        "'%s' of '%s' differs from the embedding and is used, although tie_word_embeddings is true",
        HEAD,
        checkpoint.path,
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(checkpoint: Checkpoint, first: str, second: str, dtype: torch.dtype) -> bool:
    """Return whether two weights are equal in ``dtype``; a quantised one and another that is not are different."""
    shape = checkpoint.shape_of(first)
    if checkpoint.shape_of(second) != shape or checkpoint.is_packed(first) != checkpoint.is_packed(second):
        return False  # quantised rows may take the whole weight to read
    num_rows = shape[0] if shape else 0
    for start in range(0, num_rows, _COMPARED_ROWS):
        rows = Shard(0, num_rows, start, min(start + _COMPARED_ROWS, num_rows))
        if not torch.equal(*(checkpoint.read(name, rows).to(dtype) for name in (first, second))):
            return False
    return True


def require_parameters(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Sequence[int]],
    config: ModelConfig,
    parallel: TensorParallel,
    dtype: torch.dtype,
    *,
    has_others: bool = False,
) -> list[StoredParameter]:
    """Check the headers of the files; return the parameters that they store, in the order of ``shapes``.

    Call it before memory is allocated for a model: only the headers show that the sizes of a config are real.

    Args:
        checkpoint: whose headers are checked; nothing is read.
        shapes: of this rank's parameters, by name.
        config: of the whole model.
        parallel: the rank whose share it is.
        dtype: of the weights, except for a few that stay float32.
        has_others: whether the checkpoint has tensors of other models, too.

    Raises:
        ModelLoadError: if tensors are missing, unexpected, or of another shape than the config says.
    """
    unused, parameters = set(checkpoint.names), []
    for name, shape in unstack(shapes):
        # Each is checked before the next is taken: a config may say that there are many more experts than are stored.
        parameters.append(parameter := _parameter(name, shape, checkpoint, config, parallel, dtype))
        for part in parameter.parts:
            checkpoint.require(part.name, shape if part.shard is None else part.shard.stored_shape(shape))
            unused.discard(part.name)
    if not has_others:
        _require_used(checkpoint, unused, config)
    return parameters


def _parameter(
    name: str,
    shape: list[int],
    checkpoint: Checkpoint,
    config: ModelConfig,
    parallel: TensorParallel,
    dtype: torch.dtype,
) -> StoredParameter:
    parts = stored_parts(name, checkpoint, config, parallel.rank, parallel.size)
    is_router = config.experts is not None and config.experts.float32_router and name.endswith(".mlp.gate.weight")
    is_float32 = is_router or name.endswith(_FLOAT32)
    is_tied_head = name == HEAD and config.tie_word_embeddings
    return StoredParameter(name, shape, torch.float32 if is_float32 else dtype, parts, is_tied_head)


def _require_used(checkpoint: Checkpoint, unused: set[str], config: ModelConfig) -> None:
    """Raise ModelLoadError if some of the tensors that no parameter needs are not known to be superfluous."""
    if config.tie_word_embeddings:
        unused.discard(HEAD)  # a copy that some checkpoints keep
    unused = {name for name in unused if not unread(name, checkpoint, config)}
    unused -= unneeded_biases(checkpoint, unused)
    if left := sorted(name for name in unused if not _DERIVED.search(name)):
        raise ModelLoadError(
            f"checkpoint '{checkpoint.path}' has {len(left)} tensors that a {config.architecture} does not, "
            f"'{left[0]}' for one; its {checkpoint.description} does not describe it: {checkpoint.remedy}"
        )


def read_weights(
    checkpoint: Checkpoint,
    parameters: Sequence[StoredParameter],
    device: torch.device,
    *,
    may_be_mapped: Callable[[str], bool] = lambda name: True,
    is_coded: Callable[[str], bool] = lambda name: False,
    show_progress: bool = False,
) -> Iterator[tuple[str, Weight]]:
    """Yield the name of each parameter, and its tensor on the device or its codes.

    They are read on several threads, ahead of the caller by at most the size of the largest file. On the CPU, a tensor
    that is stored in the parameter's dtype may be a view of the mapped file; writing to it changes a private copy. All
    others are filled from the file in one pass. With tied embeddings the head is the same tensor as the embedding. All
    weights are checked to be finite: one NaN makes every answer noise, without an error.

    Args:
        checkpoint: must stay open while the weights are read.
        parameters: what ``require_parameters`` returns.
        may_be_mapped: whether a parameter of this name may be a view of the file, if it needs no change. Return False
            for one that the caller copies: its memory is then freed with it, and not with the last tensor of the file.
        is_coded: whether a parameter of this name is read as codes; all its parts have a ``code_format``.
        show_progress: show a bar on stderr if that is a terminal, else log the progress of a load that takes long.

    Raises:
        ModelLoadError: if one has NaN or infinite weights, or a file cannot be read.
    """
    checkpoint.expect(dict.fromkeys(part.name for parameter in parameters for part in parameter.parts))
    sizes = {parameter.name: parameter.num_bytes(is_coded=is_coded(parameter.name)) for parameter in parameters}
    weights = _read_each(checkpoint, parameters, sizes, device, may_be_mapped, is_coded)
    return with_progress(weights, sizes) if show_progress else weights


def _read_each(
    checkpoint: Checkpoint,
    parameters: Sequence[StoredParameter],
    sizes: Mapping[str, int],
    device: torch.device,
    may_be_mapped: Callable[[str], bool],
    is_coded: Callable[[str], bool],
) -> Iterator[tuple[str, Weight]]:
    def read(parameter: StoredParameter) -> Weight | None:
        if parameter.is_tied_head:
            return None  # the embedding is yielded again
        for part in parameter.parts:
            checkpoint.reached(part.name)
        if is_coded(parameter.name):
            has_factors = have_factors(parameter.parts)
            return joined([_read_coded(checkpoint, part, has_factors=has_factors) for part in parameter.parts])
        is_mapped = may_be_mapped(parameter.name) and ".experts." not in parameter.name  # those are put into one tensor
        weight, is_known_finite = _assemble(checkpoint, parameter, device, may_be_mapped=is_mapped)
        if not is_known_finite and not is_finite(weight):
            raise weights_not_finite(checkpoint, parameter.name, parameter.parts, parameter.dtype)
        return weight

    is_tied = any(parameter.is_tied_head for parameter in parameters)
    embedding: Weight | None = None
    for parameter, weight in read_ahead(
        parameters, read, lambda parameter: sizes[parameter.name], checkpoint.largest_file_bytes
    ):
        if is_tied and parameter.name == EMBEDDING:
            embedding = weight  # held for the head
        if weight is None:
            assert embedding is not None  # our models have it first
            weight = embedding
        yield parameter.name, weight
        del weight  # else it would stay in memory during the wait for the next one


def _read_coded(checkpoint: Checkpoint, part: Part, *, has_factors: bool) -> CodedMatrix:
    matrix = checkpoint.read_coded(part.name, part.shard)
    if has_factors:
        matrix = matrix.times(part.scale)
    if part.order is None:
        return matrix
    order = torch.tensor(part.order())
    firsts = torch.arange(0, matrix.shape[0], len(order))
    return matrix.rows((firsts.unsqueeze(1) + order).flatten())


def _assemble(
    checkpoint: Checkpoint, parameter: StoredParameter, device: torch.device, *, may_be_mapped: bool
) -> tuple[torch.Tensor, bool]:
    """Return a parameter on the device, and whether it is known to be finite.

    It is a view of the file if it may be and its bytes need no change, else a copy.
    """
    dtype = parameter.dtype
    if not parameter.parts:
        return torch.ones(parameter.shape, dtype=dtype, device=device), True
    first = parameter.parts[0]
    may_be_mapped = may_be_mapped and len(parameter.parts) == 1 and first.is_as_stored and device.type == "cpu"
    if may_be_mapped and not checkpoint.is_packed(first.name):
        weight = checkpoint.read(first.name, first.shard)
        if list(weight.shape) == parameter.shape and weight.dtype == dtype:
            return weight, False
    weight = _new_tensor(parameter.shape, dtype, device)
    filled, is_known_finite = 0, True
    for part in parameter.parts:
        count = len(weight) if part.shard is None or part.shard.dim else part.shard.stop - part.shard.start
        rows = weight[filled : filled + count]
        is_known_finite &= checkpoint.read_into(rows, part.name, part.shard) and part.scale == 1.0
        if part.order is not None:
            order = torch.tensor(part.order(), device=device)
            rows.copy_(rows.view(-1, len(order), *rows.shape[1:]).index_select(1, order).flatten(0, 1))
        if part.scale != 1.0:
            rows.mul_(part.scale)
        filled += count
    weight[filled:].zero_()  # the last ranks' part of the vocabulary may be padded
    return weight, is_known_finite


def _new_tensor(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return own_memory(tuple(shape), dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)

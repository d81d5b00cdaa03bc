"""read_weights: yields the parameters of our model from a checkpoint's tensors, one at a time.

A parameter of ours is one tensor of the checkpoint or several concatenated ones (fused projections). Every parameter
must be found and every tensor used: a checkpoint that does not match its config is rejected before anything is read. A
tensor-parallel rank reads only its own part of each tensor, so no process ever holds the whole model. Nothing here
keeps a parameter that the caller has released.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint import Checkpoint
from engine.models.config import ModelConfig
from engine.models.experts.weights import expert_parts, stored_block, unstack
from engine.models.sharding import Shard, shard_of
from engine.models.tensor_parallel import TensorParallel

__all__ = ["read_weights"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what the config implies
_ROTATED = ("q_proj", "k_proj")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of ours, and the stored tensors that make it up."""

    name: str
    shape: list[int]  # this rank's
    parts: list[tuple[str, Shard | None]]  # stored name, and this rank's part of it
    orders: list[list[int] | None]  # of the elements of each part's heads, as RopeConfig.element_order has it

    @property
    def is_tied_head(self) -> bool:
        """Whether it shares the embedding's tensor."""
        return self.name == _HEAD and self.parts[0][0] != _HEAD


def read_weights(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Sequence[int]],
    config: ModelConfig,
    parallel: TensorParallel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter's name and its tensor on the device, in the order of ``shapes``.

    Stacked experts come one by one, as ``unstack`` names them.

    On the CPU, a tensor that is stored in this ``dtype`` is a view of the mapped file, of which nothing has been read
    yet; writing to it changes a private copy. All others are filled from the file in one pass. With tied embeddings
    the head is the same tensor as the embedding.

    Args:
        checkpoint: must stay open while the weights are read.
        shapes: of this rank's parameters, by name.
        config: of the whole model.
        parallel: the rank whose share is read.
        show_progress: show a bar on stderr, if that is a terminal.

    Raises:
        ModelLoadError: if tensors are missing, unexpected, or of another shape than the config says.
    """
    parameters = [_parameter(name, shape, checkpoint, config, parallel) for name, shape in unstack(shapes)]
    _require_match(checkpoint, parameters, config)
    checkpoint.expect(dict.fromkeys(name for parameter in parameters for name, _ in parameter.parts))
    weights = _read_each(checkpoint, parameters, dtype, device)
    if show_progress:
        sizes = {one.name: 0 if one.is_tied_head else math.prod(one.shape) * dtype.itemsize for one in parameters}
        weights = _with_progress(weights, sizes)
    return weights


def _parameter(
    name: str, shape: list[int], checkpoint: Checkpoint, config: ModelConfig, parallel: TensorParallel
) -> _Parameter:
    rank, size = parallel.rank, parallel.size
    if config.experts is not None and (experts := expert_parts(name, checkpoint, config.experts, rank, size)):
        return _Parameter(name, shape, [*experts], [None] * len(experts))
    stored = _stored_names(name, checkpoint, config)
    shards = [shard_of(part, config, rank, size) for part in stored]
    order = config.rope.element_order(config.head_dim)
    orders = [order if any(module in part for module in _ROTATED) else None for part in stored]
    for fused, modules in _FUSED.items():
        if fused in name and fused in config.family.fused:
            stored = ["model." + name] * len(modules)
            shards = _within_fused(shards)
    return _Parameter(name, shape, list(zip(stored, shards, strict=True)), orders)


def _within_fused(shards: Sequence[Shard | None]) -> list[Shard | None]:
    """Return the same parts of tensors that are stored one after another in one."""
    within: list[Shard | None] = []
    full, start = sum(shard.full for shard in shards if shard is not None), 0
    for shard in shards:
        assert shard is not None  # fused projections are always sharded
        within.append(Shard(shard.dim, full, start + shard.start, start + shard.stop))
        start += shard.full
    return within


def _stored_names(name: str, checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Return the checkpoint's names of our parameter ``name``: several where it is fused."""
    if name == _HEAD:
        return ["model." + _EMBEDDING if config.tie_word_embeddings else _HEAD]
    *path, module, kind = name.split(".")
    if module in config.family.stored_norms:
        return [".".join(("model", *path, config.family.stored_norms[module], kind))]
    for fused, parts in _FUSED.items():
        if fused in name:
            return ["model." + name.replace(fused, part) for part in parts]
    return [stored_block(name, checkpoint)]


def _require_match(checkpoint: Checkpoint, parameters: Iterable[_Parameter], config: ModelConfig) -> None:
    """Raise ModelLoadError unless the checkpoint has exactly the tensors that the parameters need."""
    unused = set(checkpoint.names)
    for parameter in parameters:
        for name, shard in parameter.parts:
            checkpoint.require(name, parameter.shape if shard is None else shard.stored_shape(parameter.shape))
            unused.discard(name)
    if config.tie_word_embeddings:
        unused.discard(_HEAD)  # a copy that some checkpoints keep
    if left := sorted(name for name in unused if not _DERIVED.search(name)):
        raise ModelLoadError(
            f"checkpoint '{checkpoint.path}' has {len(left)} tensors that a {config.architecture} does not, "
            f"'{left[0]}' for one; its config.json does not describe it"
        )


def _read_each(
    checkpoint: Checkpoint, parameters: Sequence[_Parameter], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    is_tied = any(parameter.is_tied_head for parameter in parameters)
    embedding: torch.Tensor | None = None
    for parameter in parameters:
        if parameter.is_tied_head and embedding is not None:
            yield parameter.name, embedding
            continue
        weight = _assemble(checkpoint, parameter, dtype, device)
        if is_tied and parameter.name == _EMBEDDING:
            embedding = weight  # held for the head
        yield parameter.name, weight
        del weight  # or the next one would be read while this one is still held


def _with_progress(
    weights: Iterator[tuple[str, torch.Tensor]], sizes: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights and show how many of their bytes the caller has processed."""
    from tqdm import tqdm

    with tqdm(total=sum(sizes.values()), desc="Loading weights", unit="B", unit_scale=True, disable=None) as bar:
        for name, weight in weights:
            yield name, weight
            del weight
            bar.update(sizes[name])


def _assemble(checkpoint: Checkpoint, parameter: _Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a parameter on the device: a view of the file if its bytes need no change, else a new tensor."""
    if len(parameter.parts) == 1:
        weight = checkpoint.read(*parameter.parts[0])
        if list(weight.shape) == parameter.shape:
            return weight.to(device=device, dtype=dtype)
    weight = torch.empty(parameter.shape, dtype=dtype, device=device)
    filled = 0
    for (name, shard), order in zip(parameter.parts, parameter.orders, strict=True):
        assert shard is not None  # fused and padded parameters are always sharded
        part = weight[filled : filled + shard.stop - shard.start]
        checkpoint.read_into(part, name, shard)
        if order is not None:
            part.copy_(part.view(-1, len(order), *part.shape[1:])[:, order].flatten(0, 1))
        filled += len(part)
    weight[filled:].zero_()  # the last ranks' part of the vocabulary may be padded
    return weight

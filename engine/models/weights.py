"""Reading weights: a checkpoint's tensors become the parameters of our model, one finished parameter at a time.

A parameter of ours is one tensor of the checkpoint or several, one below the other (fused projections). Every
parameter must be found and every tensor used, so that a checkpoint which is not what its config says is refused, and
before anything of it is read. A tensor-parallel rank reads only its own part of each tensor, so no process ever holds
the whole model. What becomes of a parameter is the caller's business: nothing here holds on to it.
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
from engine.models.sharding import Shard, shard_of
from engine.models.tensor_parallel import TensorParallel

__all__ = ["read_weights"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what the config implies
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of ours, and the stored tensors of which it is made."""

    name: str
    shape: list[int]  # this rank's
    parts: list[tuple[str, Shard | None]]  # stored name, and what of it is this rank's

    @property
    def is_tied_head(self) -> bool:
        """Whether it is the embedding once more."""
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

    A tensor that is stored just so, on the CPU and in this ``dtype``, is a view of the mapped file, of which nothing
    has been read yet; whoever writes to it changes its own copy. All others are filled from the file in one pass. With
    tied embeddings the head is the very tensor that the embedding is.

    Args:
        checkpoint: to read from; it must stay open meanwhile.
        shapes: of this rank's parameters, by name.
        config: the whole model's.
        parallel: which rank's share is wanted.
        show_progress: with a bar on stderr, if that is a terminal.

    Raises:
        ModelLoadError: if tensors are missing, left over or of another shape than the config says.
    """
    parameters = [_parameter(name, list(shape), config, parallel) for name, shape in shapes.items()]
    _require_match(checkpoint, parameters, config)
    checkpoint.expect(name for parameter in parameters for name, _ in parameter.parts)
    weights = _read_each(checkpoint, parameters, dtype, device)
    if show_progress:
        sizes = {one.name: 0 if one.is_tied_head else math.prod(one.shape) * dtype.itemsize for one in parameters}
        weights = _with_progress(weights, sizes)
    return weights


def _parameter(name: str, shape: list[int], config: ModelConfig, parallel: TensorParallel) -> _Parameter:
    stored = _stored_names(name, tied=config.tie_word_embeddings)
    return _Parameter(name, shape, [(part, shard_of(part, config, parallel.rank, parallel.size)) for part in stored])


def _stored_names(name: str, *, tied: bool) -> list[str]:
    """Return the checkpoint's names of our parameter ``name``: several where it is fused."""
    if name == _HEAD:
        return ["model." + _EMBEDDING if tied else _HEAD]
    for fused, parts in _FUSED.items():
        if fused in name:
            return ["model." + name.replace(fused, part) for part in parts]
    return ["model." + name]


def _require_match(checkpoint: Checkpoint, parameters: Iterable[_Parameter], config: ModelConfig) -> None:
    """Raise ModelLoadError unless the checkpoint has what the parameters are made of, and nothing else."""
    unused = set(checkpoint.names)
    for parameter in parameters:
        for name, shard in parameter.parts:
            shape = list(parameter.shape)
            if shard is not None:
                shape[shard.dim] = shard.full
            checkpoint.require(name, shape)
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
    """Pass the weights on and show how many of their bytes the caller has dealt with."""
    from tqdm import tqdm

    with tqdm(total=sum(sizes.values()), desc="Loading weights", unit="B", unit_scale=True, disable=None) as bar:
        for name, weight in weights:
            yield name, weight
            del weight
            bar.update(sizes[name])


def _assemble(checkpoint: Checkpoint, parameter: _Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a parameter on the device: a view where its bytes are as they should be, else a tensor of its own."""
    if len(parameter.parts) == 1:
        weight = checkpoint.read(*parameter.parts[0])
        if list(weight.shape) == parameter.shape:
            return weight.to(device=device, dtype=dtype)
    weight = torch.empty(parameter.shape, dtype=dtype, device=device)
    rows = 0
    for name, shard in parameter.parts:
        assert shard is not None  # whatever is fused or padded is shared out
        count = shard.stop - shard.start
        checkpoint.read_into(weight[rows : rows + count], name, shard)
        rows += count
    weight[rows:].zero_()  # a last rank's part of the vocabulary is padded
    return weight

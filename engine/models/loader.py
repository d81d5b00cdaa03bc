"""Loading: a checkpoint directory becomes a Decoder with its weights on the device.

A parameter of ours is one tensor of the checkpoint or several, concatenated (fused projections). Every parameter must
be found and every tensor used, so that a checkpoint which is not what its config says is refused, not half loaded.
A tensor-parallel rank reads only its own part of each tensor, so no process ever holds the whole model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from engine.distributed.tensor_parallel import TensorParallel
from engine.errors import ModelLoadError
from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.rope import rope_table
from engine.models.sharding import shard_of

__all__ = ["load_decoder"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what the config implies


def load_decoder(
    path: str | Path,
    hf_config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    parallel: TensorParallel,
) -> Decoder:
    """Build the model that ``hf_config`` describes and fill it from the directory's safetensors.

    Raises:
        ModelLoadError: if tensors are missing, left over or of another shape than the config says.
        ConfigError: if the ranks cannot share the model evenly.
    """
    config = ModelConfig.from_hf(hf_config)
    rope = rope_table(hf_config, config.head_dim, max_model_len)
    with torch.device("meta"):
        model = Decoder(config, rope, parallel)
    model.rope = rope.to(device)
    with open_checkpoint(path) as checkpoint:
        weights = {}
        for name, parameter in model.named_parameters():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            parts = [_read(checkpoint, part, parameter, model) for part in _stored_names(name)]
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            assert weight.shape == parameter.shape
            weights[name] = weight.to(device=device, dtype=dtype)
        _require_all_read(checkpoint, path, config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _stored_names(name: str) -> list[str]:
    """Return the checkpoint's names of our parameter ``name``: several where it is fused."""
    if name == "lm_head.weight":
        return [name]
    for fused, parts in _FUSED.items():
        if fused in name:
            return ["model." + name.replace(fused, part) for part in parts]
    return ["model." + name]


def _read(checkpoint: Checkpoint, name: str, parameter: nn.Parameter, model: Decoder) -> torch.Tensor:
    """Return this rank's part of the stored tensor ``name``, which is our ``parameter`` or lies in it."""
    shard = shard_of(name, model.config, model.parallel.rank, model.parallel.size)
    shape = list(parameter.shape)
    if shard is None:
        return checkpoint.read(name, shape)
    rows = shape[0]
    shape[shard.dim] = shard.full
    part = checkpoint.read(name, shape, shard)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        part = F.pad(part, (0, 0, 0, rows - part.shape[0])) if part.shape[0] < rows else part
    return part


def _require_all_read(checkpoint: Checkpoint, path: str | Path, config: ModelConfig) -> None:
    unread = [name for name in checkpoint.unread if not _DERIVED.search(name)]
    if config.tie_word_embeddings:
        unread = [name for name in unread if name != "lm_head.weight"]  # a copy that some checkpoints keep
    if unread:
        raise ModelLoadError(
            f"checkpoint '{path}' has {len(unread)} tensors that a {config.architecture} does not, '{unread[0]}' "
            "for one; its config.json does not describe it"
        )

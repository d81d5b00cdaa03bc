"""Loading: a checkpoint directory becomes a Decoder with its weights on the device.

A parameter of ours is one tensor of the checkpoint or several, concatenated (fused projections). Every parameter must
be found and every tensor used, so that a checkpoint which is not what its config says is refused, not half loaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelLoadError
from engine.models.checkpoint import Checkpoint, open_checkpoint
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.rope import rope_table

__all__ = ["load_decoder"]

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what the config implies


def load_decoder(
    path: str | Path, hf_config: Any, *, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Decoder:
    """Build the model that ``hf_config`` describes and fill it from the directory's safetensors.

    Raises:
        ModelLoadError: if tensors are missing, left over or of another shape than the config says.
    """
    config = ModelConfig.from_hf(hf_config)
    rope = rope_table(hf_config, config.head_dim, max_model_len)
    with torch.device("meta"):
        model = Decoder(config, rope)
    model.rope = rope.to(device)
    with open_checkpoint(path) as checkpoint:
        weights = {}
        for name, parameter in model.named_parameters():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            weight = _read(checkpoint, name)
            if weight.shape != parameter.shape:
                raise ModelLoadError(
                    f"'{name}' of '{path}' has shape {list(weight.shape)}, but its config says {list(parameter.shape)}"
                )
            weights[name] = weight.to(device=device, dtype=dtype)
        _require_all_read(checkpoint, path, config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return the tensor of our parameter ``name``, fused from the checkpoint's parts if need be."""
    if name == "lm_head.weight":
        return checkpoint.read(name)
    for fused, parts in _FUSED.items():
        if fused in name:
            return torch.cat([checkpoint.read("model." + name.replace(fused, part)) for part in parts])
    return checkpoint.read("model." + name)


def _require_all_read(checkpoint: Checkpoint, path: str | Path, config: ModelConfig) -> None:
    unread = [name for name in checkpoint.unread if not _DERIVED.search(name)]
    if config.tie_word_embeddings:
        unread = [name for name in unread if name != "lm_head.weight"]  # a copy that some checkpoints keep
    if unread:
        raise ModelLoadError(
            f"checkpoint '{path}' has {len(unread)} tensors that a {config.architecture} does not, '{unread[0]}' "
            "for one; its config.json does not describe it"
        )

"""What the operations of base.py must compute, in float64 and rounded once. Tests compare with it; it is slow.

Only the residual stream is rounded before its norm, because the layers after it see it rounded too.
"""

from __future__ import annotations

import math

import torch

from kernels.cache import reference
from kernels.layer_ops.base import Activation, Addend, LatentCache, LayerCache, Norm, Rotation

__all__ = ["add_norm", "gated_activation", "rotate_and_store", "rotate_and_store_latents"]


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    mean_square = (x * x).mean(dim=-1, keepdim=True)
    return x / (mean_square + norm.eps).sqrt() * (norm.weight.double() + norm.adds_one)


def add_norm(residual: torch.Tensor, addend: Addend | None, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `LayerOps.add_norm`."""
    total = residual
    if addend is not None:
        exact = residual.double() + addend.scale * _normed(addend.values.double(), addend.norm)
        total = (exact if addend.sum_scale is None else exact * addend.sum_scale.double()).to(residual.dtype)
    return total, _normed(total.double(), norm).to(residual.dtype)


def rotate_and_store(
    qkv: torch.Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
    rotation: Rotation | None,
    cache: LayerCache,
    value_eps: float | None = None,
) -> torch.Tensor:
    """Compute `LayerOps.rotate_and_store`."""
    _, _, num_kv_heads, head_dim = cache.keys.shape
    key_width = num_kv_heads * head_dim if cache.slot_mapping is not None else 0
    query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * key_width, key_width, key_width], dim=1)

    def rotated(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        x = x.double()
        if norm is not None and norm.weight.shape != (head_dim,):
            x, norm = _normed(x, norm), None
        x = _normed(x.view(x.shape[0], x.shape[1] // head_dim, head_dim), norm)
        return _rotated(x, rotation).to(qkv.dtype)

    if cache.slot_mapping is None:
        return rotated(query, query_norm)
    values = value.view(-1, num_kv_heads, head_dim)
    if value_eps is not None:
        exact = values.double()
        values = (exact / ((exact * exact).mean(dim=-1, keepdim=True) + value_eps).sqrt()).to(qkv.dtype)
    scales = cache.key_scale, cache.value_scale
    reference.store_kvcache(rotated(key, key_norm), values, cache.keys, cache.values, cache.slot_mapping, *scales)
    return rotated(query, query_norm)


def rotate_and_store_latents(
    query: torch.Tensor,
    rotated: torch.Tensor,
    latent: torch.Tensor,
    norm: Norm,
    rotation: Rotation | None,
    cache: LatentCache,
) -> None:
    """Compute `LayerOps.rotate_and_store_latents`."""
    rank = norm.weight.shape[0]
    query[..., rank:] = _rotated(rotated.double(), rotation).to(query.dtype)
    keys = _rotated(latent[:, None, rank:].double(), rotation)[:, 0]
    entries = torch.cat((_normed(latent[:, :rank].double(), norm), keys), dim=1).to(latent.dtype)
    reference.store_kvcache(entries[:, None], None, cache.latents.unsqueeze(2), None, cache.slot_mapping)


def _rotated(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate the heads of ``x`` [num_tokens, num_heads, head_dim] in float64."""
    if rotation is None:
        return x
    cos, sin = rotation.table[rotation.positions].double().unsqueeze(2).unbind(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute `LayerOps.gated_activation`."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        activated = gate * gate.sigmoid()
    else:
        activated = 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))
    return (activated * up).to(gate_up.dtype)

"""TorchOps: the operations of a layer by torch's operators, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from kernels.cache.store_kvcache import store_kvcache
from kernels.layer_ops.base import Activation, Addend, LatentCache, LayerCache, LayerOps, Norm, Rotation

__all__ = ["TorchOps", "rotate_heads"]

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class TorchOps(LayerOps):
    """The operations as torch computes them: 16-bit numbers are rounded after each operator."""

    def add_norm(
        self, residual: torch.Tensor, addend: Addend | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if addend is not None:
            residual = torch.add(residual, _normed(addend.values, addend.norm), alpha=addend.scale)
            if addend.sum_scale is not None:
                residual = residual * addend.sum_scale
        return residual, _normed(residual, norm)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        query_norm: Norm | None,
        key_norm: Norm | None,
        rotation: Rotation | None,
        cache: LayerCache,
        value_eps: float | None = None,
    ) -> torch.Tensor:
        _, _, num_kv_heads, head_dim = cache.keys.shape
        if cache.slot_mapping is None:
            return _heads(qkv, query_norm, rotation, head_dim)
        key_width = num_kv_heads * head_dim
        query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * key_width, key_width, key_width], dim=1)
        query, key = _heads(query, query_norm, rotation, head_dim), _heads(key, key_norm, rotation, head_dim)
        value = value.view(-1, num_kv_heads, head_dim)
        if value_eps is not None:
            value = F.rms_norm(value, (head_dim,), eps=value_eps)
        scales = cache.key_scale, cache.value_scale
        store_kvcache(key, value, cache.keys, cache.values, cache.slot_mapping, *scales)
        return query

    def rotate_and_store_latents(
        self,
        query: torch.Tensor,
        rotated: torch.Tensor,
        latent: torch.Tensor,
        norm: Norm,
        rotation: Rotation | None,
        cache: LatentCache,
    ) -> None:
        rank = norm.weight.shape[0]
        query[..., rank:] = rotate_heads(rotated, rotation)
        keys = rotate_heads(latent[:, None, rank:], rotation)[:, 0]
        entries = torch.cat((_normed(latent[:, :rank], norm), keys), dim=1)
        store_kvcache(entries.unsqueeze(1), None, cache.latents.unsqueeze(2), None, cache.slot_mapping)

    def gated_activation(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return x
    width = (norm.weight.shape[0],)
    if norm.adds_one:
        return (F.rms_norm(x.float(), width, eps=norm.eps) * (1.0 + norm.weight.float())).type_as(x)
    return F.rms_norm(x, width, norm.weight, norm.eps)


def _heads(x: torch.Tensor, norm: Norm | None, rotation: Rotation | None, head_dim: int) -> torch.Tensor:
    """Normalize and rotate the heads of ``x`` [num_tokens, num_heads * head_dim]."""
    norms_each_head = norm is not None and norm.weight.shape[0] == head_dim
    if not norms_each_head:
        x = _normed(x, norm)
    x = x.view(x.shape[0], x.shape[1] // head_dim, head_dim)
    if norms_each_head:
        x = _normed(x, norm)
    return rotate_heads(x, rotation)


def rotate_heads(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate the heads of ``x`` [num_tokens, num_heads, head_dim]."""
    if rotation is None:
        return x
    cos, sin = rotation.cos_and_sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

"""What the kernels of this folder must compute, as plainly as torch allows. Those of attention/ and cpu/ stand there.

Tests compare the kernels with these functions, which are slow and never used to serve.
"""

from __future__ import annotations

import torch


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Compute `kernels.store_kvcache`; shapes and meaning are documented there."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]


def argmax_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.argmax.argmax_rows`."""
    return rows.amax(dim=1), rows.argmax(dim=1)


def route(logits: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.experts.route`; of equal logits the first ones are chosen."""
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    exponentials = logits.double().exp()
    weights = (exponentials / exponentials.sum(dim=1, keepdim=True)).gather(1, ids).float()
    return weights / weights.sum(dim=1, keepdim=True) if normalize else weights, ids


def experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute `kernels.experts.experts` token by token, in float64."""
    output = torch.zeros_like(hidden, dtype=torch.float64)
    for token, (its_weights, its_ids) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(its_weights, its_ids, strict=True):
            gate, up = (gate_up[expert].double() @ hidden[token].double()).chunk(2)
            output[token] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return output.to(hidden.dtype)

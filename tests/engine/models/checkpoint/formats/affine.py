"""Integers with scales and zero points, and integers packed in words, as simply as they can be written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Affine", "pack_rows", "quantise", "sorted_groups"]


@dataclass(frozen=True)
class Affine:
    """A quantised weight: (codes - zeros) * scales, each element with those of its group."""

    codes: torch.Tensor  # [out, in], from 0
    scales: torch.Tensor  # [out, groups]
    zeros: torch.Tensor  # [out, groups]
    group_of: torch.Tensor  # [in]

    @property
    def values(self) -> torch.Tensor:
        """What it means, float32 [out, in]."""
        return (self.codes - self.zeros[:, self.group_of]).float() * self.scales.float()[:, self.group_of]


def quantise(
    weight: torch.Tensor,
    bits: int,
    group_of: torch.Tensor,
    *,
    is_symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Affine:
    """Quantise a matrix whose columns belong to groups."""
    largest, num_groups = (1 << bits) - 1, int(group_of.max()) + 1
    groups = [weight[:, group_of == group] for group in range(num_groups)]
    low = torch.stack([group.amin(1) for group in groups], 1).clamp(max=0)
    high = torch.stack([group.amax(1) for group in groups], 1).clamp(min=0)
    if is_symmetric:
        scales = (2 * torch.maximum(high, -low) / largest).clamp(min=1e-4).to(dtype)
        zeros = torch.full(scales.shape, 1 << bits - 1)
    else:
        scales = ((high - low) / largest).clamp(min=1e-4).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, largest).long()
    zeros[0, 0] = 0 if not is_symmetric else zeros[0, 0]
    codes = (weight / scales.float()[:, group_of] + zeros[:, group_of]).round().clamp(0, largest).long()
    return Affine(codes, scales, zeros, group_of)


def sorted_groups(group_of: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return the group of each input as ``desc_act`` gives it: projections of the same inputs have the same order."""
    return group_of[torch.randperm(len(group_of), generator=torch.Generator().manual_seed(len(group_of) + seed))]


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows of integers as int32 words: the bits one after another, the lowest first."""
    as_bits = np.unpackbits(codes.numpy().astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    joined = as_bits.reshape(len(codes), -1)
    padded = np.pad(joined, ((0, 0), (0, -joined.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())

"""PackedAltUp: a layer's weights for several residual streams as the C kernels read them (csrc/layer/altup.h)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.bindings import CAltUp
from kernels.cpu.library import require

__all__ = ["PackedAltUp", "match_rows"]

_MOST_STREAMS = 16  # as in altup.h


class PackedAltUp:
    """One layer's weights, float32, zero until they are set.

    Args:
        num_streams: residual streams.
        active: the one that the layer computes.
        hidden_size: elements of a token in a stream.
        eps: of the router's norm.
    """

    def __init__(self, num_streams: int, active: int, hidden_size: int, eps: float) -> None:
        assert 1 <= num_streams <= _MOST_STREAMS
        self._router, self._norm = torch.zeros(num_streams, hidden_size), torch.zeros(hidden_size)
        self._fused = torch.zeros(num_streams, hidden_size)
        self._predictions = torch.zeros(num_streams * num_streams, num_streams)
        self._corrections = torch.zeros(num_streams, num_streams)
        self._output_scale = torch.zeros(hidden_size)
        self.c_altup = CAltUp(  # has their addresses only
            self._fused.data_ptr(),
            self._predictions.data_ptr(),
            self._corrections.data_ptr(),
            None,
            num_streams,
            active,
            eps,
        )

    @property
    def address(self) -> int:
        """Where the structure is, which must outlive what reads it there."""
        return ctypes.addressof(self.c_altup)

    def set_router(self, weight: torch.Tensor) -> None:
        """Set the router, [num_streams, hidden_size]."""
        self._router.copy_(weight)
        self._fuse()

    def set_router_norm(self, weight: torch.Tensor) -> None:
        """Set the weights of the norm before the router, [hidden_size]."""
        self._norm.copy_(weight)
        self._fuse()

    def _fuse(self) -> None:
        self._fused.copy_(self._router * self._norm / len(self._norm))

    def set_predictions(self, weight: torch.Tensor) -> None:
        """Set the weights of predictions, [num_streams * num_streams, num_streams]."""
        self._predictions.copy_(weight)

    def set_corrections(self, weight: torch.Tensor) -> None:
        """Set the weights of corrections, [num_streams, num_streams]."""
        self._corrections.copy_(weight)

    def set_output_scale(self, scale: torch.Tensor) -> None:
        """Set what multiplies the active stream as it gates the layer's own input, [hidden_size]; without it 1 does."""
        self._output_scale.copy_(scale)
        self.c_altup.output_scale = self._output_scale.data_ptr()


def match_rows(rows: torch.Tensor, reference: torch.Tensor) -> None:
    """Scale rows to the root mean square of the reference's rows; both float32 [num_rows, width]."""
    for tensor in (rows, reference):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
    assert rows.shape == reference.shape
    require().pagoda_match_rows(rows.data_ptr(), reference.data_ptr(), *rows.shape)

"""RecurrentMetadata: one step's batch as the kernels of recurrent layers see it.

tokens        [ a | b b b | c c ]     packed: sequence a computes 1 token, b 3, c 2
cu_seqlens    [ 0   1       4    6 ]
slots         [ 5   0       3 ]       where each sequence's state is, in the state pools of every layer
starts        [ 0   1       0 ]       b begins here: its state is zero, whatever its slot holds
saves         [ 2 -> 7 ]              after its token 2, the state of b is written to slot 7 too: a snapshot
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RecurrentMetadata"]


@dataclass(frozen=True, eq=False)
class RecurrentMetadata:
    """One step's batch, the same for every layer.

    A padding sequence, as CUDA graphs need them, has slot -1: no state is read or written, and its output may be
    anything. Saves with slot -1 are padding too; their tokens are num_tokens or more, and come last.
    """

    cu_seqlens: torch.Tensor  # int32 [num_seqs + 1]
    slots: torch.Tensor  # int32 [num_seqs]; all different, but for -1
    starts: torch.Tensor  # int32 [num_seqs]; 1: the first token of the sequence is at position 0
    save_tokens: torch.Tensor  # int32 [num_saves], strictly ascending: the tokens after which a state is saved
    save_slots: torch.Tensor  # int32 [num_saves]; different from all slots
    num_decodes: int  # the first sequences, with exactly one token each

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, padding included."""
        return self.slots.shape[0]

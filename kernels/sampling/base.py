"""SamplingOps: the interface of changing logits and choosing tokens on a GPU. Nothing is computed here.

The C kernels of a CPU (kernels/cpu/sampling.py) choose the same tokens from the same logits: see exact_math.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

__all__ = ["ANY_TOKEN", "NO_TOKEN", "Limits", "SamplingOps"]

NO_TOKEN = -1  # stands for a token id: the logits hold a NaN or infinity, or every token is forbidden
ANY_TOKEN = -1  # stands for a token id in a bad word: it matches every token


@dataclass(frozen=True, slots=True)
class Limits:
    """Which tokens may be drawn. Of equal scores the smaller id comes first.

    A score is (logit - the row's largest) / temperature. Its weight is that of ``exact_math.weights_of``,
    and that of all tokens ``exact_math.total_weights``.

    Attributes:
        top_k: int64 [num_rows, 1]: how many of the first tokens are kept; the size of the vocabulary: all.
        top_p: float32 [num_rows, 1]: of these the fewest that have this share of their weight; inf: all.
        floors: float32 [num_rows, 1]: of these the ones with at least this score; -inf: all.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    floors: torch.Tensor


class SamplingOps(ABC):
    """Changes some rows of a batch of logits, and chooses tokens from them, without waiting for the device.

    All methods take ``logits``, float32 [batch_size, vocab_size], whose last dimension is contiguous.

    Those that choose take ``tokens``, int64 [batch_size], to which they write the chosen tokens, or NO_TOKEN; and
    ``indices``, int64 [num_rows]: the rows that they serve, or None for all. The other arguments have one row for each
    of these.

    Those that change logits do it in place, and touch no others. Each logit is computed as reference.py does it, with
    the same roundings, so the bits are those of a CPU.
    """

    # --- change logits ------------------------------------------------------------------------------------------

    @abstractmethod
    def add_biases(
        self, logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, biases: torch.Tensor
    ) -> None:
        """Add ``biases``, float32 [num_pairs], to ``logits[indices, token_ids]``, both int64, which all differ."""

    @abstractmethod
    def forbid_tokens(
        self, logits: torch.Tensor, indices: torch.Tensor, token_ids: torch.Tensor, missing: torch.Tensor
    ) -> None:
        """Add -inf to ``logits[indices, token_ids]`` where ``missing`` is above 0; all int64 [num_pairs]."""

    @abstractmethod
    def forbid_words(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        token_ids: torch.Tensor,
        words: torch.Tensor,
        owners: torch.Tensor,
        tails: torch.Tensor,
    ) -> None:
        """Add -inf to the logit of a word's last token where its other tokens are the last ones of its sequence.

        Args:
            indices, token_ids: int64 [num_words]: where the last token's logit is; words may share it.
            words: int64 [num_words, width]: the other tokens, on the left ANY_TOKEN.
            owners: int64 [num_words]: rows of the tails.
            tails: int64 [num_sequences, width]: the last tokens of the sequences.
        """

    @abstractmethod
    def penalise_repetition(
        self, logits: torch.Tensor, indices: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor
    ) -> None:
        """Divide logits above 0 by the penalty, and multiply others with it.

        Args:
            indices: int64 [num_rows].
            seen: bool [num_rows, vocab_size]: which logits.
            penalties: float32 [num_rows, 1].
        """

    @abstractmethod
    def penalise_counts(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> None:
        """Subtract the frequency penalty times the count, and then the presence penalty, where the count is above 0.

        Args:
            indices: int64 [num_rows].
            counts: int32 [num_rows, vocab_size].
            frequency, presence: float32 [num_rows, 1].
        """

    @abstractmethod
    def apply_bitmask(self, logits: torch.Tensor, indices: torch.Tensor | None, bitmask: torch.Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf.

        Args:
            indices: int64 [num_rows], or None for all rows.
            bitmask: int32 [num_rows, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 allows token i.
        """

    # --- choose tokens ------------------------------------------------------------------------------------------

    @abstractmethod
    def argmax(self, tokens: torch.Tensor, logits: torch.Tensor, indices: torch.Tensor | None) -> None:
        """Choose the most likely token, of equal ones the first."""

    @abstractmethod
    def draw(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        indices: torch.Tensor | None,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """Draw from the softmax of the logits divided by the temperature.

        Args:
            temperatures: float32 [num_rows, 1].
            keys: int32 [num_rows, 2], of the noise of ``exact_math.gumbel_noise``.
        """

    @abstractmethod
    def truncated_draw(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        indices: torch.Tensor | None,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        limits: Limits,
    ) -> None:
        """Draw as ``draw`` does, from the tokens within the limits."""

    @abstractmethod
    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile what the other methods launch for logits with these strides; the first two rows are overwritten."""

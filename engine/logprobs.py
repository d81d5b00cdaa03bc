"""Log-probabilities as they are handed out: what one position's tokens were worth to the model.

They are the model's own, before temperature, penalties or masks. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Logprob", "TokenLogprobs"]


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position, as in vLLM."""

    logprob: float
    rank: int  # 1 is the likeliest; tokens that are equally likely share a rank
    decoded_token: str | None = None  # filled in where text is made


TokenLogprobs = dict[int, Logprob]  # one position: the sampled (or prompt) token first, then the likeliest in order

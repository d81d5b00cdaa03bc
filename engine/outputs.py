"""EngineOutput: new tokens of one answer, on their way back from the scheduler to the client.

The scheduler's step creates one for each answer, AsyncEngine joins those of several steps when the reader lags, and the
ingress turns them into text. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EngineOutput", "FinishReason", "Logprob", "RequestTiming", "TokenLogprobs"]


class FinishReason(enum.StrEnum):
    """Why an answer ended, as in the OpenAI API; ``abort``, for a client that disconnected, is an addition."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position, as in vLLM.

    It is the model's own, before temperature, penalties or masks.
    """

    logprob: float
    rank: int  # 1 is the most likely; tokens that are equally likely share a rank
    decoded_token: str | None = None  # set where tokens become text


TokenLogprobs = dict[int, Logprob]  # one position: the sampled (or prompt) token first, then the most likely in order


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds that an engine has spent on one request, known from its first token on."""

    queue_s: float  # from arrival to the first step
    prefill_s: float  # from the first step to the first token
    decode_s: float = 0.0  # from the first token to the last one; 0 before that


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """New tokens of one answer of a request, and how the answer ended if it did. It pickles small."""

    request_id: str
    index: int  # of the answer
    token_ids: list[int]  # empty when the answer ended without a new token
    finish_reason: FinishReason | None = None  # set on the answer's last output
    stop_reason: int | str | None = None  # the id of stop_token_ids that ended it, or why it was aborted
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    is_last: bool = False  # the request has ended
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first output of answer 0, if asked for
    cumulative_logprob: float | None = None  # of the whole answer so far, if logprobs are computed
    timing: RequestTiming | None = None  # with an answer's first output, and with the request's last one
    replica: str = ""  # name of the replica that generated them, where there are several

    @classmethod
    def join(cls, outputs: Sequence[EngineOutput], replica: str = "") -> EngineOutput:
        """Return consecutive outputs of one answer as one."""
        first, last = outputs[0], outputs[-1]
        return cls(
            last.request_id,
            last.index,
            [token_id for output in outputs for token_id in output.token_ids],
            last.finish_reason,
            last.stop_reason,
            last.num_cached_tokens,
            last.is_last,
            None if first.logprobs is None else [one for output in outputs for one in output.logprobs or ()],
            first.prompt_logprobs,
            last.cumulative_logprob,
            last.timing or first.timing,
            replica,
        )

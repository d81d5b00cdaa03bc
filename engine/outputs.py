"""The new tokens of answers, on their way from the scheduler's step to the client.

A step makes StepOutputs. AsyncEngine divides them among the OutputReaders of the requests, and the ingress turns them
into text. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

__all__ = ["EngineOutput", "FinishReason", "Logprob", "OutputReader", "RequestTiming", "StepOutputs", "TokenLogprobs"]


class FinishReason(enum.StrEnum):
    """Why an answer ended, as in the OpenAI API; ``abort``, for a client that disconnected, is an addition."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Logprob(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One token's log-probability at one position, as in vLLM.

    It is the model's own, before temperature, penalties or masks.
    """

    logprob: float
    rank: int  # 1 is the most likely; tokens that are equally likely share a rank
    decoded_token: str | None = None  # set where tokens become text


TokenLogprobs = dict[int, Logprob]  # one position: the sampled (or prompt) token first, then the most likely in order


class RequestTiming(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Seconds that an engine has spent on one request, known from its first token on."""

    queue_s: float  # from arrival to the first step
    prefill_s: float  # from the first step to the first token
    decode_s: float = 0.0  # from the first token to the last one; 0 before that


class EngineOutput(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """New tokens of one answer of a request, and how the answer ended if it did."""

    request_id: str
    index: Annotated[int, Meta(ge=0)]  # of the answer
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
    num_accepted_predicted: int = 0  # tokens of the request's prediction that became tokens of this output
    num_rejected_predicted: int = 0  # and those that were tried beside them in vain
    pooled: bytes | None = None  # the vector or the scores of a text, little-endian float32

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
            max(first.num_cached_tokens, last.num_cached_tokens),  # a plain token has none
            last.is_last,
            None if first.logprobs is None else [position for output in outputs for position in output.logprobs or ()],
            first.prompt_logprobs,
            last.cumulative_logprob,
            last.timing or first.timing,
            replica,
            sum(output.num_accepted_predicted for output in outputs),
            sum(output.num_rejected_predicted for output in outputs),
            last.pooled,
        )


class StepOutputs:
    """What one step generated. Iterate over it for EngineOutputs.

    Nearly every output is one token of answer 0, neither its first nor its last, without log-probabilities. For such a
    plain token no EngineOutput is made.

    Attributes:
        request_ids: the requests that got a plain token.
        token_ids: the token of each.
        others: all other outputs. One that belongs to a request of ``request_ids`` comes after its plain token.
    """

    __slots__ = ("others", "request_ids", "token_ids")

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.token_ids: list[int] = []
        self.others: list[EngineOutput] = []

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[EngineOutput]:
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield EngineOutput(request_id, 0, [token_id])
        yield from self.others

    def extend(self, later: StepOutputs) -> None:
        """Add the outputs of the step after this one."""
        if self.others:  # a plain token may follow one of them
            self.others += later
        else:
            self.request_ids += later.request_ids
            self.token_ids += later.token_ids
            self.others = later.others


class OutputReader(Protocol):
    """Receives the outputs of its requests. Only the step thread calls the methods; they must be quick.

    Each request names its reader, and a tag by which the reader knows the request. A request ends with exactly one of:
    an output with ``is_last``, ``fail``, or ``end``.
    """

    def publish(self, tags: list[Any], token_ids: list[int], others: list[tuple[Any, EngineOutput]]) -> None:
        """Take the outputs of one step: the requests that got a plain token, these tokens, and all other outputs."""

    def fail(self, tag: Any, error: Exception) -> None:
        """End a request with an error of its own."""

    def end(self, tag: Any) -> None:
        """End a request that was aborted."""

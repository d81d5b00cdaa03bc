"""Sequence: the tokens of one request and how far the engine has come with them.

One rule drives the engine: a sequence has ``num_computed_tokens``, and a step computes some tokens behind it. There is
no prefill mode and no decode mode; a sequence whose last token is computed gets a new one sampled.
"""

from __future__ import annotations

import enum

from engine.prefix_hash import block_hash
from engine.sampling_params import SamplingParams

__all__ = ["FinishReason", "Sequence", "SequenceStatus"]


class SequenceStatus(enum.Enum):
    """Where a sequence is: in the queue, in the batch, or done."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in the words of the OpenAI API (``abort`` is ours: the client went away)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Sequence:
    """The state of one request inside the engine.

    Args:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token id.
        params: how to sample and when to stop.
        arrival: position in the order of arrival, for first-come-first-served scheduling.
        root: root of this sequence's block hash chain.
        cache_salt: what salted ``root``; sequences share blocks only under equal salts.
        stop_token_ids: every id that ends the sequence (EOS ids of the model included, unless ignored).
        max_total_tokens: length at which the sequence ends with reason ``length``.
        seed: of this sequence's sampling.
        priority: higher is more important.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "cache_salt",
        "content_ids",
        "finish_reason",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_kv_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "priority",
        "request_id",
        "root",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: int,
        root: int,
        stop_token_ids: frozenset[int],
        max_total_tokens: int,
        seed: int,
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.arrival = arrival
        self.root = root
        self.cache_salt = cache_salt
        self.stop_token_ids = stop_token_ids
        self.max_total_tokens = max_total_tokens
        self.seed = seed
        self.priority = priority
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None  # the id of stop_token_ids that ended it; None for the model's EOS
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache served when the sequence first ran
        self.num_computed_tokens = 0
        self.num_kv_tokens = 0  # leading tokens whose K and V are in the cache: >= num_computed_tokens
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the leading full blocks, made on demand
        self.content_ids: list[int] = []  # identity of what each published or matched block holds

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 in steady decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self.status is SequenceStatus.FINISHED

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of scheduling: the smallest goes first (highest priority, then earliest arrival)."""
        return (-self.priority, self.arrival)

    def block_hash(self, index: int, block_size: int) -> int:
        """Return the chained hash of full block ``index``, extending the cached chain as far as needed."""
        hashes = self.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.root
            hashes.append(block_hash(parent, self.token_ids[start : start + block_size]))
        return hashes[index]

    def append_token(self, token_id: int) -> None:
        """Append a sampled token and end the sequence if it was the last one."""
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.params.min_tokens:
            assert self.params.stop_token_ids is not None
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
            self.finish(FinishReason.STOP)
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason) -> None:
        """End the sequence; its blocks are the block manager's to free."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason

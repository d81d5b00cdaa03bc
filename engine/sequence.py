"""Sequence and SequenceGroup: the tokens of one request and how many of them are computed.

One rule drives the engine: a sequence has ``num_computed_tokens``, and a step computes some of the tokens that follow.
There is no prefill mode and no decode mode: a sequence whose last token is computed samples the next one. A request is
a group of sequences. It has one, or several for several answers or beams, which fork when the prompt is computed.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from engine.kv.prefix_hash import BYTES_PER_TOKEN, pack_tokens, packed_block_hash
from engine.outputs import FinishReason, RequestTiming, TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.beam_search import BeamSearch

if TYPE_CHECKING:
    from engine.structured_outputs.grammar import Grammar  # imports torch

__all__ = ["Sequence", "SequenceGroup", "SequenceStatus"]


class SequenceStatus(enum.Enum):
    """Waiting sequences have no blocks, swapped ones wait with their blocks in the host pool."""

    WAITING = enum.auto()
    SWAPPED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """The state of one answer inside the engine.

    Args:
        group: the request that the answer belongs to.
        index: index of the answer within the request.
        token_ids: the prompt tokens, then the generated ones.
        num_prompt_tokens: number of prompt tokens.
        seed: seed of this sequence's sampling.
    """

    __slots__ = (
        "__weakref__",
        "awaits_token",
        "block_hashes",
        "block_table",
        "cache_epoch",
        "content_ids",
        "cumulative_logprob",
        "finish_reason",
        "first_pages",
        "grammar",
        "group",
        "has_failed",
        "has_plain_outputs",
        "host_pages",
        "host_slot",
        "host_table",
        "index",
        "is_single",
        "kept_snapshot",
        "logprobs",
        "max_total_tokens",
        "next_block_boundary",
        "num_cached_tokens",
        "num_chained_tokens",
        "num_computed_tokens",
        "num_matched_tokens",
        "num_pending",
        "num_prompt_tokens",
        "params",
        "seed",
        "state_slot",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self, group: SequenceGroup, index: int, token_ids: list[int], *, num_prompt_tokens: int, seed: int
    ) -> None:
        self.group = group
        self.index = index
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = seed
        # The next four are copies of the group's, since each step reads them for every sequence.
        self.is_single = group.num_slots == 1
        self.params = group.params
        self.stop_token_ids = group.stop_token_ids
        self.max_total_tokens = group.max_total_tokens
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token that ended it (None for EOS), or why it failed
        self.has_failed = False  # it ended because it had no token to continue with
        self.has_plain_outputs = False  # each further token is output alone, unless it ends the answer: see StepOutputs
        self.grammar: Grammar | None = None
        self.logprobs: list[TokenLogprobs] = []  # of the generated tokens, if the request wants them
        self.cumulative_logprob = 0.0
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache served when the sequence first ran
        self.num_computed_tokens = 0
        self.num_matched_tokens = 0  # leading tokens with K and V from the prefix cache, which are not written again
        self.num_pending = 0  # 1 while the step that samples its next token is in flight, else 0
        self.awaits_token = False  # it computes nothing until the host knows its pending token
        self.block_table: list[int] = []
        # While it is swapped: its blocks, its pages of each window, and its state, all in their host pools.
        self.host_table: list[int] = []
        self.host_pages: list[list[int]] = []
        self.host_slot = -1
        self.block_hashes: list[int] = []  # of the leading full blocks, computed on demand
        self.content_ids: list[int] = []  # content id of each published or matched block
        self.num_chained_tokens = 0  # cached when it started, in blocks of which it may use a part: where prompts part
        self.state_slot = -1  # of its states, while it runs; -1 if the model has none
        self.kept_snapshot: tuple[int, int] | None = None  # that of its answer: its block and id, see KeptSnapshots
        self.first_pages: list[int] = []  # for each window: the first block of the table whose page it holds
        self.cache_epoch = 0  # of the prefix cache when the sequence started; it publishes its blocks there only
        # BlockManager.allocate must be called when num_computed_tokens reaches this.
        self.next_block_boundary = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.group.request_id

    @property
    def cache_key(self) -> str:
        """Only sequences with equal keys share blocks."""
        return self.group.request.cache_key

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, with the pending one, which only the device knows yet."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, with the pending one."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 in steady decoding."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, as far as the host knows them."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether each further token is simply the most likely one: sampling is greedy, and no stop token is masked."""
        params = self.params
        return params.is_plain_greedy and (not self.stop_token_ids or self.num_output_tokens >= params.min_tokens)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether sampling its next token takes state that the host makes from all tokens before it."""
        return self.grammar is not None or self.params.needs_history

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self.status is SequenceStatus.FINISHED

    @property
    def priority_key(self) -> tuple[int, int, int, int]:
        """Order of scheduling, the smallest first: that of the request, then the index."""
        return (*self.group.priority_key, self.index)

    def block_hash(self, index: int, block_size: int) -> int:
        """Return the chained hash of full block ``index``, extending the cached chain as far as needed."""
        hashes = self.block_hashes
        if len(hashes) <= index:
            packed = pack_tokens(self.token_ids[len(hashes) * block_size : (index + 1) * block_size])
            width = block_size * BYTES_PER_TOKEN
            for start in range(0, len(packed), width):
                parent = hashes[-1] if hashes else self.group.root
                hashes.append(packed_block_hash(parent, packed[start : start + width]))
        return hashes[index]

    def fork(self, index: int, seed: int) -> Sequence:
        """Return a sequence with the same tokens; ``BlockManager.fork`` makes it share the blocks."""
        child = Sequence(self.group, index, list(self.token_ids), num_prompt_tokens=self.num_prompt_tokens, seed=seed)
        child.status = self.status
        child.block_hashes = list(self.block_hashes)
        child.num_cached_tokens = self.num_cached_tokens
        child.grammar = self.grammar.fork() if self.grammar is not None else None
        return child

    def continued(self, token_ids: list[int], grammar: Grammar | None) -> Sequence:
        """Return the sequence as it would be after further tokens, to sample the next one; it shares no blocks.

        Args:
            token_ids: the further tokens.
            grammar: its grammar in the state after them.
        """
        tokens = self.token_ids + token_ids
        longer = Sequence(self.group, self.index, tokens, num_prompt_tokens=self.num_prompt_tokens, seed=self.seed)
        longer.grammar = grammar
        return longer

    def check_end(self, token_id: int) -> None:
        """End the sequence if ``token_id``, just appended, was the last one."""
        if self.grammar is not None and not self.grammar.accept(token_id):
            self._remove_last_token()
            self.fail("the grammar does not accept the token")
        elif token_id in self.stop_token_ids and self.num_output_tokens > self.params.min_tokens:
            assert self.params.stop_token_ids is not None
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
            self.finish(FinishReason.STOP)
        elif self.grammar is not None and self.grammar.is_terminated:  # the grammar allows no further token
            self.finish(FinishReason.STOP)
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish(FinishReason.LENGTH)

    def fail(self, why: str) -> None:
        """End the sequence because it has no token to continue with.

        If its grammar is complete, the answer ends with reason ``stop``. Otherwise, also if the grammar itself failed,
        the text is a fragment: the reason is ``abort``, and ``stop_reason`` says why.
        """
        self.has_failed = True
        error = None if self.grammar is None else self.grammar.error
        if self.grammar is not None and self.grammar.is_terminated and error is None:
            self.finish(FinishReason.STOP)
        else:
            self.stop_reason = error or why
            self.finish(FinishReason.ABORT)

    def _remove_last_token(self) -> None:
        """Remove the last token, and its log-probability if that is recorded."""
        self.token_ids.pop()
        if self.params.logprobs is not None:
            self.cumulative_logprob -= next(iter(self.logprobs.pop().values())).logprob

    def finish(self, reason: FinishReason) -> None:
        """End the sequence; the caller lets the block manager free its blocks."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.num_pending, self.awaits_token = 0, False  # the pending token is dropped


class SequenceGroup:
    """One request: the sequences that answer it, which are scheduled, preempted and swapped together.

    Args:
        request: the prompt, its parameters, and the tokens that were generated on another replica.
        arrival: position in the order of arrival.
        root: root of the block hash chain.
        stop_token_ids: every id that ends a sequence (EOS ids of the model included, unless ignored).
        max_total_tokens: length at which a sequence ends with reason ``length``.
        seed: seed of the first answer; answer ``i`` has ``seed + i``.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "beams",
        "is_forked",
        "max_total_tokens",
        "num_blocks_held",
        "num_blocks_saved",
        "num_preemptions",
        "num_resumed_tokens",
        "num_slots",
        "params",
        "prompt_logprobs",
        "request",
        "root",
        "seed",
        "sequences",
        "stop_token_ids",
        "timing",
        "turn",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        arrival: int,
        root: int,
        stop_token_ids: frozenset[int],
        max_total_tokens: int,
        seed: int,
    ) -> None:
        params, prompt, output = request.params, request.prompt_token_ids, request.output_token_ids
        self.request = request
        self.params = params
        self.arrival = arrival
        self.turn = 0  # see ClientTurns; 0 before it is queued
        self.root = root
        self.stop_token_ids = stop_token_ids
        self.max_total_tokens = max_total_tokens
        self.seed = seed
        self.num_preemptions = 0
        self.num_resumed_tokens = len(output)
        # When sharing saved the most blocks: the blocks of all tables minus the distinct ones, and those of all tables.
        self.num_blocks_saved = 0
        self.num_blocks_held = 0
        self.timing: RequestTiming | None = None
        self.num_slots = params.num_sequences  # slots of the batch, for its sequences now and after it forks
        self.is_forked = self.num_slots == 1
        # Of the prompt tokens computed so far; the first token has none.
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.beams: BeamSearch | None = None
        if params.beam_width is not None:
            self.beams = BeamSearch(params.beam_width, params.length_penalty, params.early_stopping, len(prompt))
        first = Sequence(self, 0, [*prompt, *output], num_prompt_tokens=len(prompt), seed=seed)
        self.sequences = [first]  # all answers so far, finished ones included; of beams only those that continue

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def priority(self) -> int:
        """The request's priority: higher is more important."""
        return self.request.priority

    @property
    def priority_key(self) -> tuple[int, int, int]:
        """Order of scheduling, the smallest first: highest priority, then earliest turn, then earliest arrival."""
        return (-self.priority, self.turn, self.arrival)

    @property
    def has_started(self) -> bool:
        """Whether it ever ran, here or on another replica; the client may have seen some of its tokens."""
        return self.status is SequenceStatus.RUNNING or self.num_preemptions > 0 or self.num_resumed_tokens > 0

    @property
    def status(self) -> SequenceStatus:
        """The status that all its unfinished sequences have."""
        return next(
            (sequence.status for sequence in self.sequences if not sequence.is_finished), SequenceStatus.FINISHED
        )

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that are not finished, in order."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return all(sequence.is_finished for sequence in self.sequences)

    def record_sharing(self) -> None:
        """Record how many blocks the unfinished answers save by sharing, if they save more than ever before."""
        tables = [sequence.block_table for sequence in self.sequences if sequence.block_table]
        held = sum(map(len, tables))
        if (saved := held - len(set().union(*tables))) > self.num_blocks_saved:
            self.num_blocks_saved, self.num_blocks_held = saved, held

    @property
    def outputs_at_end(self) -> bool:
        """Whether outputs come only at the end, when the best answers are known."""
        return self.beams is not None or self.params.num_sequences > self.params.n

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the request wants log-probabilities of prompt tokens that are not computed yet."""
        return self.params.prompt_logprobs is not None and (
            len(self.prompt_logprobs) < self.sequences[0].num_prompt_tokens
        )

    def prompt_logprob_positions(self, start: int, end: int) -> range:
        """Return the positions from ``start`` to ``end`` whose logits give prompt logprobs not recorded yet."""
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(end, self.sequences[0].num_prompt_tokens - 1))

    def fork(self) -> list[Sequence]:
        """Add the sequences for the other answers and return them; they differ from the first by their seeds."""
        assert len(self.sequences) == 1
        assert self.beams is None
        first = self.sequences[0]
        self.sequences += [first.fork(index, self.seed + index) for index in range(1, self.num_slots)]
        self.is_forked = True
        return self.sequences[1:]

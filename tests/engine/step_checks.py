"""StepChecks: what must hold for every batch, whatever the load.

Every running sequence computes a token; equal prompts share blocks; no shared block is written; drafts preempt no
request; and the slots of a published block hold what its hash claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.engine import Engine
from engine.kv import prefix_cache as prefix_cache_module
from engine.kv.host.host_pool import HostPool
from engine.kv.prefix_hash import pack_tokens, root_hash
from engine.scheduling.scheduler_output import SchedulerOutput
from engine.sequence import Sequence, SequenceStatus
from tests.engine.shadow import ShadowRunner
from tests.engine.shadow_memory import HostSlots

__all__ = ["StepChecks"]


class StepChecks:
    """Checks the steps of one engine and counts what happens in them.

    Args:
        engine: the engine; its block manager's ``free`` is wrapped.
        runner: the shadow runner that knows what each slot holds.
        counts: what has happened, and how often.
        twins_share: check that equal prompts of one step share what they can (colliding hashes prevent it).
    """

    def __init__(self, engine: Engine, runner: ShadowRunner, counts: Counter[str], *, twins_share: bool) -> None:
        self.counts = counts
        self._engine = engine
        self._runner = runner
        self._twins_share = twins_share and engine.config.enable_prefix_caching
        self._settled: set[Sequence] = set()  # the sequences that have K and V from an earlier step
        self._hashes: dict[object, int] = {}  # of prefixes that fill blocks, by identity
        self._free = engine.block_manager.free
        engine.block_manager.free = self._free_and_check  # type: ignore[method-assign]

    def start_step(self, unfinished: list[Sequence]) -> None:
        """Note which of the unfinished sequences have blocks before the step."""
        self._settled = {sequence for sequence in unfinished if sequence.block_table or sequence.host_table}

    def check(self, output: SchedulerOutput) -> None:
        """Check a scheduled batch before it is computed."""
        self._check_no_starvation(output)
        if self._twins_share:
            self._check_same_step_sharing(output)
        self._check_writes(output)
        self._check_drafts(output)
        self._count(output)

    def _check_no_starvation(self, output: SchedulerOutput) -> None:
        """Assert that every running sequence computes a token, unless it waits for others of its own request."""
        assert output.num_tokens <= self._engine.config.tokens_per_step, "the budget is exceeded"
        limit = self._engine.config.long_prefill_threshold or output.num_tokens
        assert max(output.num_new_tokens, default=0) <= limit, "a prefill is longer than the threshold"
        computing = set(output.sequences)
        for sequence in self._engine.scheduler.running:
            if sequence not in computing and sequence.block_table:
                if sequence.awaits_token or (output.lacks_blocks and self._engine.scheduler._in_flight):
                    continue  # while a step is in flight
                others = [member for member in sequence.group.unfinished if member is not sequence]
                others_lag = any(not other.block_table or other.remaining_tokens > 1 for other in others)
                waits = sequence.group.beams is not None and others_lag
                assert waits, f"{sequence.request_id} is starved"

    def _check_same_step_sharing(self, output: SchedulerOutput) -> None:
        """Assert that sequences which start in this step share the full blocks that they have in common."""
        size = self._engine.info.block_size
        started = [
            (sequence, count - len(output.drafts.get(sequence, ())))
            for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True)
            if sequence not in self._settled and not sequence.group.wants_prompt_logprobs
        ]
        # What fills a block with one generated token is published later, with others, even where it is computed again.
        started = [
            (sequence, count)
            for sequence, count in started
            if count > 1 or sequence.num_computed_tokens + count <= sequence.num_prompt_tokens
        ]
        for index, (first, num_first) in enumerate(started):
            for second, num_second in started[:index]:
                if first.cache_key != second.cache_key:
                    continue
                end = min(first.num_computed_tokens + num_first, second.num_computed_tokens + num_second)
                blocks = 0
                while (blocks + 1) * size <= end and (
                    first.token_ids[blocks * size : (blocks + 1) * size]
                    == second.token_ids[blocks * size : (blocks + 1) * size]
                ):
                    blocks += 1
                assert first.block_table[:blocks] == second.block_table[:blocks], "equal prompts get duplicate blocks"
                self.counts["shared in one step"] += blocks > 0

    def _check_writes(self, output: SchedulerOutput) -> None:
        """Assert that a shared block is written only while the others find it complete after this very step."""
        manager, size = self._engine.block_manager, self._engine.info.block_size
        for sequence, count in zip(output.sequences, output.num_new_tokens, strict=True):
            first = max(sequence.num_computed_tokens, sequence.num_matched_tokens) // size
            last = (sequence.num_computed_tokens + count - 1) // size
            for index in range(first, last + 1):
                block_id = sequence.block_table[index]
                if manager.pool.blocks[block_id].ref_count > 1:
                    others = [
                        member
                        for member in self._engine.scheduler.running
                        if member is not sequence and block_id in member.block_table
                    ]
                    complete = all(other.num_matched_tokens >= (index + 1) * size for other in others)
                    assert complete, f"block {block_id} is written while others hold it"

    def _check_drafts(self, output: SchedulerOutput) -> None:
        """Assert that no beam gets a draft, no draft is beside forks, and drafts preempt no request."""
        assert list(output.drafts) == [sequence for sequence in output.sequences if sequence in output.drafts]
        if output.drafts:
            assert not output.preempted, "a request is preempted for a draft"
            assert self._engine.block_manager.num_free_blocks >= 0
        for sequence, draft in output.drafts.items():
            assert not sequence.params.uses_beam_search, "a draft for a beam"
            assert all(fork.group is not sequence.group for fork in output.forks), "a draft for a prompt that forks"
            assert not sequence.num_pending, "a draft follows a token that is not known"
            assert 0 < len(draft) <= self._engine.scheduler.drafter.num_tokens  # type: ignore[union-attr]
            assert sequence.num_tokens + len(draft) < sequence.max_total_tokens, "a draft goes beyond the answer's end"
            self.counts["tokens drafted"] += len(draft)

    def check_published(self) -> None:
        """Assert that all that is published holds what its hash claims, in every pool on the device and on the host."""
        manager, runner, size = self._engine.block_manager, self._runner, self._engine.info.block_size
        names = [block.block_hash for block in manager.pool.blocks]
        self._check_pages("block", enumerate(names), runner.slots, size)
        self._check_store("host block", manager.host_pool, runner.host_slots, size)
        for index, window in enumerate(manager.windows):
            pages = [(page.block_id, names[block_id]) for block_id, page in window.attached.by_block.items()]
            self._check_pages("page", pages, runner.window_slots[index], size)
            self._check_store("host page", window.attached.store, runner.host_window_slots[index], size)
        if manager.states is not None:
            snapshots = manager.states.snapshots
            slots = [(slot.block_id, names[block_id]) for block_id, slot in snapshots.by_block.items()]
            self._check_pages("snapshot", slots, runner.states, 1)
            self._check_store("host snapshot", snapshots.store, runner.host_states, 1)

    def _check_store(self, kind: str, store: HostPool, slots: HostSlots, page_size: int) -> None:
        """Check the pages of a host pool, but those that the next step's copies fill."""
        pages = [(page.block_id, page.block_hash) for page in store.pages.blocks]
        self._check_pages(kind, [page for page in pages if page[0] not in store._copies_out], slots, page_size)

    def _check_pages(
        self, kind: str, pages: Iterable[tuple[int, int | None]], slots: dict[int, int] | HostSlots, page_size: int
    ) -> None:
        """Assert that pages, given with the hashes of their blocks, hold the last tokens of the prefixes."""
        for page_id, block_hash in pages:
            if block_hash is None:
                continue
            foreign = f"{kind} {page_id} is published with foreign content"
            held: object = slots.get(page_id * page_size + page_size - 1)
            assert self._hash_of(held) == block_hash, foreign
            for slot in range(page_id * page_size + page_size - 2, page_id * page_size - 1, -1):
                assert isinstance(held, int)
                held = self._runner.ids.ends[held][0]
                assert slots.get(slot) == held, foreign

    def _hash_of(self, prefix: object) -> int | None:
        """Return the hash of a prefix that fills blocks, given by identity or, if it is empty, by its salt."""
        if prefix is None:
            return None
        if prefix not in self._hashes:
            if isinstance(prefix, str):
                self._hashes[prefix] = root_hash(self._engine.info.model, prefix)
            else:
                parent, tokens = prefix, []
                while len(tokens) < self._engine.info.block_size:
                    if not isinstance(parent, int):
                        return None  # an empty block, or one that is not full
                    parent, token_id = self._runner.ids.ends[parent]
                    tokens.append(token_id)
                before = self._hash_of(parent)
                if before is None:
                    return None
                # Looked up in the module, where a test may have put a hash that collides.
                packed = pack_tokens(tokens[::-1])
                self._hashes[prefix] = prefix_cache_module.packed_block_hash(before, packed)
        return self._hashes[prefix]

    def _count(self, output: SchedulerOutput) -> None:
        """Count what happened in the step."""
        counts = self.counts
        for group in output.preempted:
            counts["preempted by swap" if group.status is SequenceStatus.SWAPPED else "preempted to recompute"] += 1
        if not any(sequence in self._settled for group in output.admitted for sequence in group.unfinished):
            counts["loaded from the host"] += len(output.block_copies.swap_in)
        if not output.preempted:
            counts["evicted to the host"] += len(output.block_copies.swap_out)
        counts["copied on write"] += len(output.block_copies.on_device)
        counts["forked"] += len(output.forks)
        counts["of a group that comes back"] += sum(
            group.num_preemptions > 0 and group.params.num_sequences > 1 for group in output.admitted
        )
        counts["prefill beside decode"] += 1 in output.num_new_tokens and max(output.num_new_tokens) > 1
        counts["cached"] += sum(
            0 < sequence.num_cached_tokens == sequence.num_computed_tokens
            for sequence in output.sequences
            if sequence not in self._settled
        )

    def _free_and_check(self, sequence: Sequence) -> None:
        """Free, and assert that a prefix is evicted after the blocks that follow it."""
        table = list(sequence.block_table)
        self._free(sequence)
        members = set(table)
        freed = [block_id for block_id in self._engine.block_manager.pool._cached if block_id in members]
        assert freed == [block_id for block_id in reversed(table) if block_id in freed], "a prefix is evicted first"

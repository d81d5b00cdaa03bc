"""StateSlots: where the states of running sequences are, and the snapshots of states at which a prefix hit resumes.

A recurrent layer keeps one state for each sequence, and not one for each token. So a prefix whose keys and values are
cached can be continued only where a state was kept: at a snapshot, which hangs on the chain's block whose last token it
has seen. Slots are in one of three states:

    free        it holds nothing of value
    snapshot    a match can resume there; unlikely ones are reused first, then the least recently used one
    used        a running sequence computes with it

Snapshots are large, so they are taken where they will be used: at the last full block of a prompt, where a prompt
leaves a chain that others continue differently (as Marconi does, Pan et al., 2024), and at the last full block of an
answer. The snapshot of an answer moves with it from block to block. Further snapshots, one after every ``interval``
tokens of a prefill, are for the first prompt that leaves a chain. They are unlikely to be used: until a match resumes
there they are lost before all others, the oldest first, and they take no slot from others.

A prefill writes its snapshots while it computes; they can be matched from the next step on. All others are copies,
which are made before the step computes, as if all at the same time.

A likely snapshot that is lost for another one, or with its block, goes to the host pool. A sequence that resumes there
gets it in its own slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as GenericSequence
from typing import NamedTuple

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.attachments.state_events import StateEvents
from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.page_copies import PageCopies
from engine.kv.prefix_cache import PrefixMatch
from engine.sequence import Sequence

__all__ = ["StateSlots"]


class _Save(NamedTuple):
    """A snapshot that this step's prefill writes, to hang on a block if that holds the same content then."""

    sequence: Sequence
    num_tokens: int
    content_id: int
    slot: Block
    is_likely: bool


class Snapshots(AttachedPages):
    """The slots of states, those of snapshots hanging on blocks.

    Attributes:
        events: the changes of snapshots that a router receives.
    """

    def __init__(self, num_slots: int, blocks: GenericSequence[Block], num_host_slots: int, *, record: bool) -> None:
        host = HostPool(num_host_slots, expires_loaded=False)  # a sequence changes what it has loaded
        self.events = StateEvents(blocks, host, record=record)
        super().__init__(num_slots, blocks, host, self.events.changed, self.events.changed_on_host)
        self.events.snapshots = self.by_block

    def clear(self) -> None:
        super().clear()
        self.events.cleared()


class StateSlots:
    """Allocates slots to running sequences and to snapshots.

    Args:
        num_slots: slots in the pool.
        num_snapshots: of these, slots that running sequences leave to snapshots.
        blocks: the blocks on which snapshots hang.
        interval: tokens of a prefill after each of which a snapshot is kept; 0: none.
        num_host_slots: slots of the host pool, for evicted snapshots and the states of swapped sequences.
        record_events: collect the changes of snapshots, for ``snapshots.events``.

    Attributes:
        max_used: sequences that may have a slot at once. The other slots are for snapshots.
        snapshots: the slots that hang on blocks.
        slots: the states of the slots.
    """

    def __init__(
        self,
        num_slots: int,
        num_snapshots: int,
        blocks: GenericSequence[Block],
        *,
        interval: int = 0,
        num_host_slots: int = 0,
        record_events: bool = False,
    ) -> None:
        self._interval = interval
        self._blocks = blocks
        self.max_used = num_slots - num_snapshots
        self.snapshots = Snapshots(num_slots, blocks, num_host_slots, record=record_events)
        self.slots = self.snapshots.pages
        self._num_used = 0
        self._num_kept = 0
        self._held: list[Block] = []  # sources of this step's copies, until they are made
        self._backups: dict[Sequence, Block] = {}  # of sequences whose step computes draft tokens
        self._saves: dict[int, _Save] = {}  # what this step's prefills write, by the id of the block to hang on

    # --- running sequences --------------------------------------------------------------------------------------

    def hold(self, match: PrefixMatch, num_blocks: int) -> None:
        """Pin the snapshot after the first blocks of a match if the store has it: see ``WindowPages.hold``."""
        index = num_blocks - 1
        if index >= 0 and self.snapshots.by_block.get(match.block_id(index)) is None:
            self.snapshots.pin(match, index)

    def start(self, sequence: Sequence, match: PrefixMatch, num_blocks: int) -> None:
        """Give a sequence a slot, with the snapshot after these blocks of a match; without any, the state is zero."""
        self._num_used += 1
        index = num_blocks - 1
        if index < 0:
            sequence.state_slot = self._take().block_id
        elif (snapshot := self.snapshots.by_block.get(match.block_id(index))) is None:
            self._give_way()
            sequence.state_slot = self.snapshots.load(match, index).block_id
        else:
            self._start_from(snapshot, sequence)

    def _start_from(self, snapshot: Block, sequence: Sequence) -> None:
        """Give a sequence a copy of a snapshot, or the snapshot itself if no slot can be spared."""
        self.snapshots.mark_likely(snapshot)
        if not snapshot.ref_count and not self._make_spare(2):
            self.slots.retain(snapshot)
            assert snapshot.block_hash is not None
            self.snapshots.unhang(snapshot.block_hash)
            sequence.state_slot = snapshot.block_id
            return
        self.slots.retain(snapshot)
        self._held.append(snapshot)
        sequence.state_slot = self._take().block_id
        self.snapshots.copy(snapshot.block_id, sequence.state_slot)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give ``child`` a copy of the state of ``parent``."""
        self._num_used += 1
        child.state_slot = self._take().block_id
        self.snapshots.copy(parent.state_slot, child.state_slot)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, and drop the snapshots that it has not written yet."""
        if sequence.state_slot < 0:
            return
        self._num_used -= 1
        for block_id in [block_id for block_id, save in self._saves.items() if save.sequence is sequence]:
            self._drop(block_id)
        if (backup := self._backups.pop(sequence, None)) is not None:
            self.snapshots.copies.pop(backup.block_id, None)
            self.slots.release(backup)
        self.snapshots.copies.pop(sequence.state_slot, None)
        self.slots.release(self.slots.blocks[sequence.state_slot])
        sequence.state_slot = -1

    def back_up(self, sequence: Sequence) -> bool:
        """Keep the state of a sequence, whose step computes draft tokens; False if it has none, or there is no slot."""
        if not sequence.num_computed_tokens or not self._make_spare(1):
            return False
        self._backups[sequence] = slot = self._take()
        self.snapshots.copy(sequence.state_slot, slot.block_id)
        return True

    def drop_backup(self, sequence: Sequence) -> None:
        """Forget the state before the last step: all that the step has computed counts."""
        self.slots.release(self._backups.pop(sequence))

    def restore(self, sequence: Sequence) -> None:
        """Return to the state before the last step."""
        slot = self._backups.pop(sequence)
        self._held.append(slot)
        self.snapshots.copy(slot.block_id, sequence.state_slot)

    # --- swapping -----------------------------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence) -> int:
        """Copy the state of a sequence, which is going to be released, to the host pool; return its slot there."""
        slot = sequence.state_slot
        return self.snapshots.store.keep(None, self.snapshots.copies.get(slot, slot)).block_id

    def swap_in(self, sequence: Sequence) -> None:
        """Give a swapped sequence a slot, with its state."""
        self._num_used += 1
        sequence.state_slot = self._take().block_id
        self.snapshots.store.bring_back(sequence.host_slot, sequence.state_slot)

    # --- snapshots ----------------------------------------------------------------------------------------------

    def has_snapshot(self, match: PrefixMatch, index: int) -> bool:
        """Whether the device or the store has the states after block ``index`` of a match."""
        return match.block_id(index) in self.snapshots.by_block or self.snapshots.stored(match, index) is not None

    def positions_within(self, start: int, end: int) -> range:
        """Return the multiples of the interval after ``start`` and up to ``end``, which are tokens of a prefill."""
        step = self._interval
        return range(start + step - start % step, end + 1, step) if step else range(0)

    def save(self, sequence: Sequence, num_tokens: int, block: Block, *, is_likely: bool) -> None:
        """Let this step, which computes them, keep the state after the first ``num_tokens`` tokens, on ``block``.

        Nothing is kept if running sequences may need all slots.

        Args:
            is_likely: as ``AttachedPages.cache`` takes it. An unlikely snapshot takes no slot from a likely one.
        """
        if (existing := self.snapshots.by_block.get(block.block_id)) is not None:
            if is_likely:
                self.snapshots.mark_likely(existing)
            return
        if (pending := self._saves.get(block.block_id)) is not None:  # of another sequence with the same prefix
            if pending.content_id == block.content_id:
                self._saves[block.block_id] = pending._replace(is_likely=pending.is_likely or is_likely)
                return
            self._drop(block.block_id)
        has_slot = self._make_spare(1) if is_likely else self._num_spare > 0 and self.snapshots.num_disposable > 0
        if has_slot:
            slot = self._take()
            self._saves[block.block_id] = _Save(sequence, num_tokens, block.content_id, slot, is_likely)

    def keep(self, sequence: Sequence, block: Block) -> None:
        """Keep the state of a sequence, which has just computed the last token of ``block``, instead of its last one.

        Nothing is kept if running sequences may need all slots, or if the block has a snapshot already.
        """
        if (kept_block := self.kept_block(sequence)) is not None:
            self.snapshots.detach(kept_block)
        sequence.kept_snapshot = None
        if (existing := self.snapshots.by_block.get(block.block_id)) is not None:
            self.snapshots.mark_likely(existing)
        elif self._make_spare(1):
            slot = self._take()
            self.snapshots.copy(sequence.state_slot, slot.block_id)
            self.snapshots.cache(block.block_id, slot)
            slot.content_id, self._num_kept = self._num_kept, self._num_kept + 1
            sequence.kept_snapshot = block.block_id, slot.content_id

    def kept_block(self, sequence: Sequence) -> int | None:
        """Return the block on which the snapshot of a sequence's answer hangs, if it still hangs there."""
        if sequence.kept_snapshot is None:
            return None
        block_id, content_id = sequence.kept_snapshot
        slot = self.snapshots.by_block.get(block_id)
        return block_id if slot is not None and slot.content_id == content_id else None

    # --- a step -------------------------------------------------------------------------------------------------

    def take_copies(self) -> tuple[PageCopies, dict[Sequence, list[tuple[int, int]]]]:
        """Return the step's copies, and the snapshots that its prefills write; the next step can match those.

        They are given by sequence: how many of its tokens each one has seen, ascending, and its slot.
        """
        copies = self.snapshots.take_copies()
        saves: dict[Sequence, list[tuple[int, int]]] = {}
        for slot in self._held:
            self.slots.release(slot)
        self._held.clear()
        for block_id, (sequence, num_tokens, content_id, slot, is_likely) in self._saves.items():
            saves.setdefault(sequence, []).append((num_tokens, slot.block_id))
            if self._blocks[block_id].content_id == content_id and self.snapshots.by_block.get(block_id) is None:
                self.snapshots.cache(block_id, slot, is_likely=is_likely)
            else:
                self.slots.release(slot)
        self._saves.clear()
        return copies, saves

    def _take(self) -> Block:
        """Allocate a slot. There must be a free one, cached or not."""
        self._give_way()
        return self.snapshots.take()

    def _give_way(self) -> None:
        """Write an unlikely snapshot less in this step, if a likely one were lost for the next slot."""
        if not self.snapshots.num_disposable:
            self._drop_unlikely()

    def _make_spare(self, count: int) -> bool:
        """Write fewer unlikely snapshots in this step until ``count`` slots can be spared; whether they can."""
        while self._num_spare < count and self._drop_unlikely():
            pass
        return self._num_spare >= count

    @property
    def _num_spare(self) -> int:
        """Slots that can be taken for other ends than to start the sequences that may still start."""
        return self.slots.num_free - (self.max_used - self._num_used)

    def _drop_unlikely(self) -> bool:
        """Write the last unlikely snapshot of this step no more; False if there is none."""
        unlikely = next((block_id for block_id in reversed(self._saves) if not self._saves[block_id].is_likely), None)
        if unlikely is not None:
            self._drop(unlikely)
        return unlikely is not None

    def _drop(self, block_id: int) -> None:
        """Write a snapshot of this step no more."""
        self.slots.release(self._saves.pop(block_id).slot)

    def check_integrity(self, sequences: Collection[Sequence], block_ids: Collection[int]) -> None:
        """Assert that each slot is in one state.

        Args:
            sequences: every sequence that may have one.
            block_ids: the blocks that are used or published.
        """
        users = Counter(sequence.state_slot for sequence in sequences if sequence.state_slot >= 0)
        assert self._num_used == users.total(), "the count of used slots is off"
        assert not users or max(users.values()) == 1, "two sequences have one slot"
        kept = Counter(slot.block_id for slot in (*self._held, *self._backups.values()))
        self.slots.check_integrity(users + kept)
        assert not self._saves, "saves of a step are left"
        assert self._backups.keys() <= set(sequences), "a state from before a step is left"
        assert self.snapshots.copies.keys() <= users.keys(), "copies of a step are left"
        self.snapshots.check_integrity(block_ids)
        swapped = Counter(sequence.host_slot for sequence in sequences if sequence.host_slot >= 0)
        assert not swapped or max(swapped.values()) == 1, "two sequences have one slot on the host"
        self.snapshots.store.check_integrity(swapped)

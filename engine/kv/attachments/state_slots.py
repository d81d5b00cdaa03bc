"""StateSlots: where the states of running sequences are, and the snapshots of states at which a prefix hit resumes.

A recurrent layer keeps one state for each sequence, and not one for each token. So a prefix whose keys and values are
cached can be continued only where a state was kept: at a snapshot, which hangs on the chain's block whose last token it
has seen. Slots are in one of three states:

    free        it holds nothing of value
    snapshot    a match can resume there; unlikely ones are reused first, then the least recently used one
    used        a running sequence computes with it

Snapshots are large, so they are taken where they will be used: at the last full block of a prompt, where a prompt
leaves a chain that others continue differently (as Marconi does, Pan et al., 2024), and at the last full block of an
answer. The snapshot of an answer moves with it from block to block: see kept_snapshots.py. Further snapshots, one after
every ``interval`` tokens of a prefill, are for the first prompt that leaves a chain. They are unlikely to be used:
until a match resumes there they are lost before all others, the oldest first, and they take no slot from others.

A prefill writes its snapshots while it computes; they can be matched from the next step on. All others are copies,
which are made before the step computes, as if all at the same time.

A likely snapshot that is lost for another one, or with its block, goes to the host pool. A sequence that resumes there
gets it in its own slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as GenericSequence

from engine.kv.attachments.attached_pages import AttachedPages
from engine.kv.attachments.kept_snapshots import STAYS, KeptSnapshots
from engine.kv.attachments.state_events import StateEvents
from engine.kv.attachments.step_saves import StepSaves
from engine.kv.block_pool import Block
from engine.kv.host.host_pool import HostPool
from engine.kv.page_copies import PageCopies
from engine.kv.prefix_cache import PrefixMatch
from engine.sequence import Sequence

__all__ = ["Snapshots", "StateSlots"]


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

    @property
    def num_disposable(self) -> int:
        """Slots that ``take`` gives before a snapshot is lost at which a match is likely to resume."""
        return self.pages.num_uncached + len(self._unlikely)

    def has(self, match: PrefixMatch, index: int) -> bool:
        """Whether the device or the store has the states after block ``index`` of a match."""
        return match.block_id(index) in self.by_block or self.stored(match, index) is not None

    def mark_likely(self, page: Block) -> None:
        """Keep a snapshot as if a match had just resumed there; it no longer moves with the answer that left it."""
        page.content_id = STAYS
        super().mark_likely(page)

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
        saves: those that the next step writes.
        kept: those that move along with answers.
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
        self.max_used = num_slots - num_snapshots
        self.snapshots = Snapshots(num_slots, blocks, num_host_slots, record=record_events)
        self.saves = StepSaves(self.snapshots, blocks, interval)
        self.kept = KeptSnapshots(self.snapshots)
        self.slots = self.snapshots.pages
        self._num_used = 0
        self._held: list[Block] = []  # sources of this step's copies, until they are made
        self._backups: dict[Sequence, Block] = {}  # of sequences whose step computes draft tokens

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
        self.kept.share(parent, child)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, and drop the snapshots that it has not written yet."""
        if sequence.state_slot < 0:
            return
        self._num_used -= 1
        self.saves.drop_of(sequence)
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
        if self.saves.has(block, is_likely=is_likely):
            return
        has_slot = self._make_spare(1) if is_likely else self._num_spare > 0 and self.snapshots.num_disposable > 0
        if has_slot:
            self.saves.add(sequence, num_tokens, block, self._take(), is_likely=is_likely)

    def keep(self, sequence: Sequence, block: Block) -> None:
        """Keep the state of a sequence, which has just computed the last token of ``block``, instead of its last one.

        Nothing is kept if running sequences may need all slots, or if the block is published with a snapshot already.
        """
        self.kept.move_on(sequence)
        if (existing := self.snapshots.by_block.get(block.block_id)) is not None:
            if block.block_hash is None:  # of a fork
                self.kept.keep(sequence, block, existing)
            else:
                self.snapshots.mark_likely(existing)
        elif self._make_spare(1):
            slot = self._take()
            self.snapshots.copy(sequence.state_slot, slot.block_id)
            self.snapshots.cache(block.block_id, slot)
            self.kept.keep(sequence, block, slot)

    # --- a step -------------------------------------------------------------------------------------------------

    def take_copies(self) -> tuple[PageCopies, dict[Sequence, list[tuple[int, int]]]]:
        """Return the step's copies, and the snapshots that its prefills write: see ``StepSaves.take``."""
        copies = self.snapshots.take_copies()
        for slot in self._held:
            self.slots.release(slot)
        self._held.clear()
        return copies, self.saves.take()

    def _take(self) -> Block:
        """Allocate a slot. There must be a free one, cached or not."""
        self._give_way()
        return self.snapshots.take()

    def _give_way(self) -> None:
        """Write an unlikely snapshot less in this step, if a likely one were lost for the next slot."""
        if not self.snapshots.num_disposable:
            self.saves.drop_unlikely()

    def _make_spare(self, count: int) -> bool:
        """Write fewer unlikely snapshots in this step until ``count`` slots can be spared; whether they can."""
        while self._num_spare < count and self.saves.drop_unlikely():
            pass
        return self._num_spare >= count

    @property
    def _num_spare(self) -> int:
        """Slots that can be taken for other ends than to start the sequences that may still start."""
        return self.slots.num_free - (self.max_used - self._num_used)

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
        assert not self.saves, "saves of a step are left"
        self.kept.check_integrity(sequences)
        assert self._backups.keys() <= set(sequences), "a state from before a step is left"
        assert self.snapshots.copies.keys() <= users.keys(), "copies of a step are left"
        self.snapshots.check_integrity(block_ids)
        swapped = Counter(sequence.host_slot for sequence in sequences if sequence.host_slot >= 0)
        assert not swapped or max(swapped.values()) == 1, "two sequences have one slot on the host"
        self.snapshots.store.check_integrity(swapped)

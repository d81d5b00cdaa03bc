"""StateSlots: where the states of running sequences are, and the snapshots of states at which a prefix hit resumes.

A recurrent layer keeps one state for each sequence, and not one for each token. So a prefix whose keys and values are
cached can be continued only where a state was kept: at a snapshot, which hangs on the chain's block whose last token it
has seen. Slots are in one of three states:

    free        it holds nothing of value
    snapshot    a match can resume there; the least recently used one is reused first
    used        a running sequence computes with it

Snapshots are large, so they are taken where they will be used: at the last full block of a prompt, where a prompt
leaves a chain that others continue differently (as Marconi does, Pan et al., 2024), and at the last full block of an
answer. The snapshot of an answer moves with it from block to block.

A prefill writes its snapshots while it computes: see ``saves``; they can be matched from the next step on. All others
are copies, which are made before the step computes, as if all at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as GenericSequence

from engine.kv.block_pool import Block, BlockPool
from engine.kv.host_pool import BlockPair
from engine.kv.state_events import StateEvents
from engine.sequence import Sequence

__all__ = ["StateSlots"]


class StateSlots:
    """Allocates slots to running sequences and to snapshots.

    Args:
        num_slots: slots in the pool.
        num_snapshots: of these, slots that running sequences leave to snapshots.
        blocks: the blocks on which snapshots hang.
        record_events: collect the changes of snapshots, for ``events``.

    Attributes:
        max_used: sequences that may have a slot at once. The other slots are for snapshots.
        slots: the slots; ``block_hash`` of a snapshot's is the id of the block that it hangs on.
        saves: the snapshots that this step's prefills write: of each sequence the number of tokens that each one has
            seen, and its slot.
        num_evicted: snapshots that were lost because a slot was needed.
        events: the changes of snapshots that a router receives.
    """

    def __init__(
        self, num_slots: int, num_snapshots: int, blocks: GenericSequence[Block], *, record_events: bool = False
    ) -> None:
        self.max_used = num_slots - num_snapshots
        self.slots = BlockPool(num_slots)
        self.saves: dict[Sequence, list[tuple[int, int]]] = {}
        self.num_evicted = 0
        self._num_used = 0
        self._by_block: dict[int, Block] = {}  # the snapshot that hangs on each block
        self.events = StateEvents(blocks, self._by_block, record=record_events)
        self._sources: dict[int, int] = {}  # the copies before the next step: target -> source
        self._held: list[Block] = []  # sources of these copies, until they are made
        self._backups: dict[Sequence, Block] = {}  # of sequences whose step computes draft tokens
        # This step's saves: the block that each hangs on, None if it was replaced meanwhile, and its slot.
        self._saved: list[tuple[Block | None, Block]] = []

    # --- running sequences --------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, block: Block | None = None) -> None:
        """Give a sequence a slot: with the snapshot that hangs on ``block``, or for a state that begins with zeros."""
        self._num_used += 1
        if block is None:
            sequence.state_slot = self._take().block_id
            return
        snapshot = self._by_block[block.block_id]
        if not snapshot.ref_count and not self._can_spare(2):
            self._take_over(block.block_id, snapshot)
            sequence.state_slot = snapshot.block_id
            return
        self.slots.retain(snapshot)
        self._held.append(snapshot)
        sequence.state_slot = self._take().block_id
        self._copy(snapshot.block_id, sequence.state_slot)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give ``child`` a copy of the state of ``parent``."""
        self._num_used += 1
        child.state_slot = self._take().block_id
        self._copy(parent.state_slot, child.state_slot)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence, and drop the snapshots that it has not written yet."""
        if sequence.state_slot < 0:
            return
        self._num_used -= 1
        dropped = {slot_id for _, slot_id in self.saves.pop(sequence, ())}
        for _, slot in self._saved:
            if slot.block_id in dropped:
                self.slots.release(slot)
        self._saved = [(block, slot) for block, slot in self._saved if slot.block_id not in dropped]
        if (backup := self._backups.pop(sequence, None)) is not None:
            self._sources.pop(backup.block_id, None)
            self.slots.release(backup)
        self._sources.pop(sequence.state_slot, None)
        self.slots.release(self.slots.blocks[sequence.state_slot])
        sequence.state_slot = -1

    def back_up(self, sequence: Sequence) -> bool:
        """Keep the state of a sequence, whose step computes draft tokens; False if it has none, or there is no slot."""
        if not sequence.num_computed_tokens or not self._can_spare(1):
            return False
        self._backups[sequence] = slot = self._take()
        self._copy(sequence.state_slot, slot.block_id)
        return True

    def drop_backup(self, sequence: Sequence) -> None:
        """Forget the state before the last step: all that the step has computed counts."""
        self.slots.release(self._backups.pop(sequence))

    def restore(self, sequence: Sequence) -> None:
        """Return to the state before the last step."""
        slot = self._backups.pop(sequence)
        self._held.append(slot)
        self._copy(slot.block_id, sequence.state_slot)

    # --- snapshots ----------------------------------------------------------------------------------------------

    def has_snapshot(self, block: Block) -> bool:
        """Whether a match can resume after the last token of this block."""
        return block.block_id in self._by_block

    def save(self, sequence: Sequence, num_tokens: int, block: Block) -> None:
        """Let this step, which computes them, keep the state after the first ``num_tokens`` tokens, on ``block``.

        Nothing is kept if running sequences may need all slots.
        """
        if block.block_id in self._by_block or not self._can_spare(1):
            return
        slot = self._take()
        self.saves.setdefault(sequence, []).append((num_tokens, slot.block_id))
        self._saved.append((block, slot))

    def keep(self, sequence: Sequence, block: Block) -> None:
        """Keep the state of a sequence, which has just computed the last token of ``block``, instead of its last one.

        Nothing is kept if running sequences may need all slots.
        """
        if sequence.kept_block >= 0:
            self.detach(sequence.kept_block)
        sequence.kept_block = -1
        if block.block_id not in self._by_block and self._can_spare(1):
            slot = self._take()
            self._copy(sequence.state_slot, slot.block_id)
            self._attach(block.block_id, slot)
            sequence.kept_block = block.block_id

    def move(self, source: Block, target: Block) -> None:
        """Let the snapshot of ``source`` hang on ``target``, which holds the same tokens, unless that has one."""
        self._saved = [(target if block is source else block, slot) for block, slot in self._saved]
        if source.block_id not in self._by_block or target.block_id in self._by_block:
            self.detach(source.block_id)
            return
        slot = self._by_block.pop(source.block_id)
        self._by_block[target.block_id] = slot
        slot.block_hash = target.block_id
        self.events.changed(source.block_id)
        self.events.changed(target.block_id)

    def detach(self, block_id: int) -> None:
        """Drop the snapshot that hangs on a block, if there is one: the block will hold other tokens."""
        if self._saved:
            self._saved = [
                (None if block is not None and block.block_id == block_id else block, slot)
                for block, slot in self._saved
            ]
        slot = self._by_block.pop(block_id, None)
        if slot is None:
            return
        self.events.changed(block_id)
        slot.forget_content()
        self._sources.pop(slot.block_id, None)
        if slot.ref_count == 0:
            self.slots.uncache(slot)

    def clear(self) -> None:
        """Drop every snapshot."""
        for block_id in list(self._by_block):
            self.detach(block_id)
        self.events.cleared()

    # --- a step -------------------------------------------------------------------------------------------------

    def take_copies(self) -> tuple[list[BlockPair], dict[Sequence, list[tuple[int, int]]]]:
        """Return the step's copies, (source, target), and its saves; the next step can match what it saves."""
        copies = [(source, target) for target, source in self._sources.items()]
        self._sources = {}
        saves, self.saves = self.saves, {}
        for slot in self._held:
            self.slots.release(slot)
        self._held.clear()
        for block, slot in self._saved:
            if block is not None and block.block_id not in self._by_block:
                self._attach(block.block_id, slot)
            else:
                self.slots.release(slot)
        self._saved.clear()
        return copies, saves

    def _take(self) -> Block:
        """Allocate a slot; if no slot is free, the least recently used snapshot is dropped."""
        if self.slots.must_evict:
            block_id = self.slots.least_recently_used.block_hash
            assert block_id is not None
            self.detach(block_id)
            self.num_evicted += 1
        return self.slots.take()

    def _attach(self, block_id: int, slot: Block) -> None:
        """Let a slot, which is in use, become the snapshot of a block."""
        slot.block_hash = block_id
        self._by_block[block_id] = slot
        self.events.changed(block_id)
        self.slots.release(slot)

    def _copy(self, source: int, target: int) -> None:
        """Copy a slot before the next step. A source that is itself a target of this step has its content later."""
        self._sources[target] = self._sources.get(source, source)

    def _take_over(self, block_id: int, snapshot: Block) -> None:
        """Let a snapshot become a used slot."""
        del self._by_block[block_id]
        self.events.changed(block_id)
        self.slots.retain(snapshot)
        snapshot.forget_content()

    def _can_spare(self, count: int) -> bool:
        """Whether ``count`` slots can be taken for other ends than to start the sequences that may still start."""
        return self.slots.num_free - count >= self.max_used - self._num_used

    def check_integrity(self, sequences: Collection[Sequence], block_ids: Iterable[int]) -> None:
        """Assert that each slot is in one state, given the sequences and the blocks that hold published tokens."""
        users = Counter(sequence.state_slot for sequence in sequences if sequence.state_slot >= 0)
        assert self._num_used == users.total(), "the count of used slots is off"
        assert not users or max(users.values()) == 1, "two sequences have one slot"
        self.slots.check_integrity(users + Counter(slot.block_id for slot in self._held))
        assert not self._saved, "saves of a step are left"
        assert not self._backups, "a state from before a step is left"
        named = {slot.block_hash: slot for slot in self.slots.blocks if slot.block_hash is not None}
        assert named == self._by_block, "a snapshot is not found by its block"
        assert set(named) <= set(block_ids), "a snapshot hangs on a block that holds nothing"

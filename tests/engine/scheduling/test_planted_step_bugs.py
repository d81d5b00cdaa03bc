"""The random load detects planted bugs of draft tokens and overlapping steps, as ``test_planted_bugs.py`` describes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kv.attachments.state_slots import StateSlots
from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import Block
from engine.kv.prefix_cache import PrefixCache
from engine.scheduling import scheduler as scheduler_module
from engine.scheduling.drafting import drafter as drafter_module
from engine.scheduling.drafting.drafter import Drafter, accepted_tokens
from engine.scheduling.sampled_results import record_logprobs
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from engine.scheduling.step_builder import StepBuilder
from engine.sequence import Sequence
from engine.worker.step_plan import StepPlan
from tests.engine.random_requests import lone_arrival
from tests.engine.scheduling.planted_bugs import Plant, assert_found
from tests.engine.shadow import ShadowRunner

# --- drafts ---------------------------------------------------------------------------------------------------------


def test_accepting_one_draft_token_too_many_is_detected() -> None:
    def accepted_and_one_more(token_id: int, draft: list[int], after_draft: list[int]) -> list[int]:
        accepted = list(accepted_tokens(token_id, draft, after_draft))
        return accepted + after_draft[len(accepted) : len(accepted) + 1]

    assert_found(
        lambda patch: patch.setattr(drafter_module, "accepted_tokens", accepted_and_one_more),
        "answers|reads foreign KV",
    )


def test_a_token_after_the_accepted_ones_that_is_not_the_models_is_detected() -> None:
    """The next token is taken from the draft, as if accepted tokens made the one after them right."""

    def guesses(token_id: int, draft: list[int], after_draft: list[int]) -> list[int]:
        num_accepted = len(list(accepted_tokens(token_id, draft, after_draft)))
        return draft[1 : 1 + num_accepted]

    assert_found(lambda patch: patch.setattr(drafter_module, "accepted_tokens", guesses), "answers|reads foreign KV")


def test_tokens_after_the_end_of_an_answer_are_detected() -> None:
    def beyond_the_end(sequence: Sequence, draft: list[int]) -> list[Sequence]:
        return [sequence.continued(draft[:count], None) for count in range(1, len(draft) + 1)]

    def go_on(sequence: Sequence, output: SchedulerOutput, sampled: SampledTokens) -> int:
        draft, after_draft = output.drafts[sequence], sampled.after_drafts[sequence]
        accepted = list(accepted_tokens(sequence.token_ids[-1], draft, after_draft))
        for logprobs in sampled.logprobs_after_drafts.get(sequence, [])[: len(accepted)]:
            record_logprobs(sequence, logprobs)
        sequence.token_ids += accepted
        for token_id in accepted[-1:]:
            sequence.check_end(token_id)
        return len(accepted)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(drafter_module, "continuations_of", beyond_the_end)
        patch.setattr(drafter_module, "_append_accepted", go_on)

    assert_found(plant, "answers|continues|ends at", first_seed=22)


def test_publishing_blocks_of_rejected_draft_tokens_is_detected() -> None:
    """They are published with the tokens that the sequence got instead: their slots hold K and V of others."""
    free_draft_blocks = BlockManager.free_draft_blocks

    def publish_then_free(manager: BlockManager, sequence: Sequence) -> None:
        if manager.enable_prefix_caching:
            last = min(sequence.num_tokens, len(sequence.block_table) * manager.block_size)
            manager.prefix_cache.publish(sequence, last)
        free_draft_blocks(manager, sequence)

    assert_found(
        lambda patch: patch.setattr(BlockManager, "free_draft_blocks", publish_then_free),
        "published with foreign content",
    )


def test_counting_rejected_draft_tokens_as_computed_is_detected() -> None:
    append_accepted = drafter_module._append_accepted

    def append_and_count_all(sequence: Sequence, output: SchedulerOutput, sampled: SampledTokens) -> int:
        append_accepted(sequence, output, sampled)
        return len(output.drafts[sequence])

    assert_found(
        lambda patch: patch.setattr(drafter_module, "_append_accepted", append_and_count_all),
        "answers|tokens are computed that are not there|published with foreign content",
    )


def test_a_draft_that_keeps_unfilled_blocks_is_detected() -> None:
    assert_found(
        lambda patch: patch.setattr(BlockManager, "free_draft_blocks", lambda manager, sequence: None),
        "holds blocks that it does not fill",
    )


def test_drafts_that_exceed_the_token_budget_are_detected() -> None:
    add_drafts = Drafter.add_drafts

    def add_without_limit(drafter: Drafter, step: StepBuilder) -> None:
        if step.token_budget > 0:
            step.token_budget = drafter.num_tokens
        add_drafts(drafter, step)

    assert_found(lambda patch: patch.setattr(Drafter, "add_drafts", add_without_limit), "the budget is exceeded")


def test_a_draft_for_a_beam_is_detected() -> None:
    assert_found(lambda patch: patch.setattr(Drafter, "may_draft", lambda *_: True), "a draft for a beam")


def test_a_draft_beside_the_forks_of_its_sequence_is_detected() -> None:
    """The forks would sample from the logits of the prompt's last token, which are not the last ones of the step."""

    def forget_forks(drafter: Drafter, sequence: Sequence) -> bool:
        return sequence.group.beams is None

    assert_found(lambda patch: patch.setattr(Drafter, "may_draft", forget_forks), "a draft for a prompt that forks")


# --- steps in flight ------------------------------------------------------------------------------------------------


def assert_found_in_flight(plant: Plant, symptom: str, **options: Any) -> None:
    """Assert that a bug is found in runs whose steps overlap."""
    assert_found(plant, symptom, async_scheduling=True, **options)


def test_a_pending_token_that_the_host_must_know_is_detected() -> None:
    assert_found_in_flight(
        lambda patch: patch.setattr(Sequence, "needs_known_tokens", property(lambda sequence: False)),
        "token_ids of the plan is wrong|chosen by tokens that are not known",
    )


def test_a_token_after_the_last_one_is_detected() -> None:
    must_know_token = Scheduler._must_know_token

    def forget_length(scheduler: Scheduler, sequence: Sequence, output: SchedulerOutput) -> bool:
        is_last = len(sequence.token_ids) + sequence.num_pending >= sequence.max_total_tokens
        return not is_last and must_know_token(scheduler, sequence, output)

    assert_found_in_flight(
        lambda patch: patch.setattr(Scheduler, "_must_know_token", forget_length), "sampled after the last one"
    )


def test_a_token_after_a_draft_in_flight_is_detected() -> None:
    """Where it is in the sequence is known once the draft is accepted or rejected."""

    def forget_drafts(scheduler: Scheduler, sequence: Sequence, output: SchedulerOutput) -> bool:
        return sequence.num_tokens >= sequence.max_total_tokens or sequence.needs_known_tokens

    assert_found_in_flight(
        lambda patch: patch.setattr(Scheduler, "_must_know_token", forget_drafts), "of the plan is wrong"
    )


def test_a_wasted_token_that_is_kept_is_detected() -> None:
    assert_found_in_flight(
        lambda patch: patch.setattr(scheduler_module, "_drop_wasted", lambda output, sampled: None),
        "KeyError|continues after its end|is not in list",
    )


def test_a_step_that_goes_on_from_another_token_than_was_chosen_is_detected() -> None:
    collect = Scheduler.collect

    def not_late(scheduler: Scheduler, output: SchedulerOutput, sampled: SampledTokens, *rest: Any) -> list[Sequence]:
        sampled.resampled_on_host = []
        return collect(scheduler, output, sampled, *rest)

    assert_found_in_flight(
        lambda patch: patch.setattr(Scheduler, "collect", not_late),
        "reads foreign KV|published with foreign content|answers",
    )


def test_a_preemption_while_a_step_is_in_flight_is_detected() -> None:
    def preempt_anyway(scheduler: Scheduler, members: list[Sequence], step: StepBuilder) -> None:
        scheduler._preemption.preempt_for(members[0].group, step)

    assert_found_in_flight(
        lambda patch: patch.setattr(Scheduler, "_wait_for_blocks", preempt_anyway), "list index out of range"
    )


def test_publishing_a_block_with_a_pending_token_is_detected() -> None:
    publish = PrefixCache.publish

    def publish_pending(cache: PrefixCache, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens <= len(sequence.token_ids):
            return publish(cache, sequence, num_tokens)
        sequence.token_ids.append(0)  # what the host may take it for
        publish(cache, sequence, num_tokens)
        sequence.token_ids.pop()
        return None

    assert_found_in_flight(
        lambda patch: patch.setattr(PrefixCache, "publish", publish_pending), "published with foreign content"
    )


# --- states in flight -----------------------------------------------------------------------------------------------

FOREIGN = "continues a foreign state|published with foreign content"
STATES = {"num_slots": 6, "num_host_blocks": 0}


def test_a_state_that_has_seen_what_is_not_a_token_is_detected() -> None:
    take_sampled = StepPlan.take_sampled

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StepPlan, "take_sampled", lambda plan, ids, sampled, _: take_sampled(plan, ids, sampled, None))
        patch.setattr(ShadowRunner, "skips_state", lambda runner, sequence: False)

    assert_found_in_flight(plant, FOREIGN, **STATES)


def test_a_plan_that_lets_a_state_see_what_is_not_a_token_is_detected() -> None:
    take_sampled = StepPlan.take_sampled

    def take_no_slots(plan: StepPlan, token_ids: Any, sampled: Any, recurrent: Any) -> None:
        take_sampled(plan, token_ids, sampled, None)

    assert_found_in_flight(
        lambda patch: patch.setattr(StepPlan, "take_sampled", take_no_slots), "changed by what is not a token", **STATES
    )


def test_a_snapshot_that_is_copied_one_step_late_is_detected() -> None:
    keep, take_copies = StateSlots.keep, StateSlots.take_copies
    kept: list[tuple[int, int]] = []
    of_next_step: list[tuple[int, int]] = []

    def keep_late(states: StateSlots, sequence: Sequence, block: Block) -> None:
        before = set(states.snapshots.copies)
        keep(states, sequence, block)
        kept.extend((states.snapshots.copies.pop(slot), slot) for slot in states.snapshots.copies.keys() - before)

    def take_late(states: StateSlots) -> Any:
        copies, saves = take_copies(states)
        copies.on_device.extend(of_next_step)
        of_next_step[:] = kept
        kept.clear()
        return copies, saves

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StateSlots, "keep", keep_late)
        patch.setattr(StateSlots, "take_copies", take_late)

    assert_found_in_flight(plant, FOREIGN + "|never computed", enable_prefix_caching=True, block_size=1, **STATES)


def test_a_write_to_a_slot_that_has_its_next_owner_is_detected() -> None:
    """A device that does not work in order: what a step writes for an ended sequence arrives after the next step."""
    run_states = ShadowRunner._run_states
    written: dict[Sequence, tuple[int, int]] = {}

    def write_late(runner: ShadowRunner, output: SchedulerOutput, chains: list[list[int]]) -> None:
        late = [write for sequence, write in written.items() if sequence.is_finished]
        written.clear()
        run_states(runner, output, chains)
        for sequence in output.sequences:
            written[sequence] = sequence.state_slot, runner.states[sequence.state_slot]
        runner.states.update(late)

    assert_found_in_flight(lambda patch: patch.setattr(ShadowRunner, "_run_states", write_late), FOREIGN, **STATES)


def test_a_page_that_is_freed_before_a_draft_is_rejected_is_detected() -> None:
    """The last token is computed again, and its window reaches one token further back than that of the draft."""
    schedule = Scheduler.schedule

    def slide_all(scheduler: Scheduler) -> SchedulerOutput:
        scheduler.block_manager.slide(scheduler.running)
        return schedule(scheduler)

    assert_found_in_flight(
        lambda patch: patch.setattr(Scheduler, "schedule", slide_all),
        "of a window|page|KeyError",
        draw=lone_arrival,
        windows=((1, 80),),
        block_size=1,
        num_blocks=80,
        num_draft_tokens=4,
        twins_share=False,
        **STATES,
    )

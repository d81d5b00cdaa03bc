"""Beam search within a step: the beams that a search keeps replace its previous beams in the running batch.

BeamSearch compares tokens and scores. This module moves the sequences and their blocks accordingly.
"""

from __future__ import annotations

from engine.kv.block_manager import BlockManager
from engine.outputs import FinishReason
from engine.sampling.beam_search import Candidates, Continuation
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence

__all__ = ["advance_searches", "fail_searches"]


def fail_searches(sampling: list[Sequence], sampled: SampledTokens) -> None:
    """Fail all beams of a search if one of them has no token to sample."""
    reasons = {sampling[position].group: reason for position, reason in sampled.failed.items()}
    for position in list(sampled.beams):
        if reason := reasons.get(sampling[position].group):
            sampled.failed[position] = reason
            del sampled.beams[position]


def advance_searches(
    sampling: list[Sequence], candidates: dict[int, Candidates], queues: RequestQueues
) -> list[Sequence]:
    """Advance each search by a token: choose its next beams and update the running batch.

    Args:
        sampling: the sequences that sampled in the step.
        candidates: the candidates of the beams among them, by position in ``sampling``.
        queues: the running batch, in which the chosen beams replace the others.

    Returns:
        ``sampling`` with one sequence, the first, for each search.
    """
    updated: dict[int, Sequence] = {}
    beams_by_group: dict[int, list[tuple[Sequence, Candidates]]] = {}
    for position, sequence in enumerate(sampling):
        if position in candidates:
            beams_by_group.setdefault(id(sequence.group), []).append((sequence, candidates[position]))
        else:
            updated[id(sequence)] = sequence
    for pairs in beams_by_group.values():
        group = pairs[0][0].group
        _advance([beam for beam, _ in pairs], [tokens for _, tokens in pairs], queues)
        updated[id(group)] = group.sequences[0]
    return list(updated.values())


def _advance(beams: list[Sequence], candidates: list[Candidates], queues: RequestQueues) -> None:
    """Advance one search by a token: it ends, or the continuations replace its beams in the batch."""
    group = beams[0].group
    assert group.beams is not None
    continuations = group.beams.advance(
        [beam.token_ids for beam in beams],
        candidates,
        stop_token_ids=group.stop_token_ids,
        max_total_tokens=group.max_total_tokens,
    )
    if group.beams.is_done:  # no continuation can beat the answers found
        for beam in beams:
            queues.end_running(beam)
            beam.finish(FinishReason.STOP)
        return
    successors = _extend(beams, continuations, queues.block_manager)
    first = queues.running.index(beams[0])
    queues.running[first : first + len(beams)] = successors
    group.sequences = successors
    group.is_forked = True


def _extend(beams: list[Sequence], continuations: list[Continuation], block_manager: BlockManager) -> list[Sequence]:
    """Return one sequence for each continuation, and free the beams that have no continuation.

    The first continuation of a beam reuses its sequence; further continuations are forks of it.
    """
    continued = {continuation.parent for continuation in continuations}
    for index, beam in enumerate(beams):
        if index not in continued:  # before the forks, which need what these hold
            block_manager.free(beam)
    successors = []
    reused_parents: set[int] = set()
    for index, continuation in enumerate(continuations):
        parent = successor = beams[continuation.parent]
        if continuation.parent in reused_parents:
            successor = parent.fork(index, parent.group.seed)
            block_manager.fork(parent, successor)
        reused_parents.add(continuation.parent)
        successors.append(successor)
    for beam, continuation in zip(successors, continuations, strict=True):
        beam.cumulative_logprob = continuation.cumulative_logprob
        beam.token_ids.append(continuation.token_id)
    for index, beam in enumerate(successors):
        beam.index = index
    return successors

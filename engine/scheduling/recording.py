"""Recording: what a step sampled, written into its sequences.

It ends a sequence that has got its last token, but leaves the batch and the blocks to the scheduler.
"""

from __future__ import annotations

from engine.scheduling.step import SampledTokens
from engine.sequence import Sequence

__all__ = ["append_tokens", "fail_searches", "record_logprobs"]


def append_tokens(sampling: list[Sequence], sampled: SampledTokens) -> list[Sequence]:
    """Give every sequence its token, but beams; return those that have ended."""
    ended = []
    drawn = zip(sampling, sampled.token_ids, strict=True)
    if sampled.failed or sampled.beams:
        others = sampled.failed.keys() | sampled.beams.keys()
        drawn = (pair for position, pair in enumerate(drawn) if position not in others)  # type: ignore[assignment]
        for position, why in sampled.failed.items():
            sampling[position].fail(why)
            ended.append(sampling[position])
    for sequence, token_id in drawn:
        token_ids = sequence.token_ids
        token_ids.append(token_id)
        if (
            token_id in sequence.stop_token_ids
            or len(token_ids) >= sequence.max_total_tokens
            or sequence.grammar is not None
        ):
            sequence.check_end(token_id)
            if sequence.is_finished:
                ended.append(sequence)
    return ended


def record_logprobs(sampling: list[Sequence], sampled: SampledTokens) -> None:
    """Keep the log-probabilities of the tokens that are about to be appended, where they were asked for."""
    assert sampled.logprobs is not None
    for position, (sequence, one) in enumerate(zip(sampling, sampled.logprobs, strict=True)):
        if one is not None and position not in sampled.failed:
            sequence.cumulative_logprob += next(iter(one.values())).logprob  # the sampled token comes first
            if sequence.params.logprobs is not None:
                sequence.logprobs.append(one)


def fail_searches(sampling: list[Sequence], sampled: SampledTokens) -> None:
    """Let a search whose beams have no token to go on with fail as a whole."""
    reasons = {sampling[position].group: why for position, why in sampled.failed.items()}
    for position in list(sampled.beams):
        if why := reasons.get(sampling[position].group):
            sampled.failed[position] = why
            del sampled.beams[position]

"""apply_sampled: appends the sampled tokens of a step to its sequences, with their log-probabilities.

A sequence ends here with its last token. The scheduler then removes it from the batch and frees its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.outputs import TokenLogprobs
from engine.scheduling.scheduler_output import SampledTokens
from engine.sequence import Sequence

__all__ = ["apply_sampled", "record_logprobs"]


def apply_sampled(sampling: list[Sequence], sampled: SampledTokens) -> list[Sequence]:
    """Append the sampled tokens, except those of beams; return the sequences that have ended."""
    for group, logprobs in sampled.prompt_logprobs:
        group.prompt_logprobs += logprobs
    if sampled.logprobs is not None:
        _record_logprobs(sampling, sampled)
    if not sampled.failed and not sampled.beams:
        return _append_tokens(zip(sampling, sampled.token_ids, strict=True))
    failed = [sampling[position] for position in sampled.failed]
    for sequence, reason in zip(failed, sampled.failed.values(), strict=True):
        sequence.fail(reason)
    without_token = sampled.failed.keys() | sampled.beams.keys()
    pairs = zip(sampling, sampled.token_ids, strict=True)
    return failed + _append_tokens(pair for position, pair in enumerate(pairs) if position not in without_token)


def _append_tokens(tokens: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
    """Append each sequence's token; return the sequences that end with it."""
    ended = []
    for sequence, token_id in tokens:
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


def _record_logprobs(sampling: list[Sequence], sampled: SampledTokens) -> None:
    """Keep the log-probabilities of the tokens that are about to be appended, where the request wants them."""
    assert sampled.logprobs is not None
    for position, (sequence, logprobs) in enumerate(zip(sampling, sampled.logprobs, strict=True)):
        if logprobs is not None and position not in sampled.failed:
            record_logprobs(sequence, logprobs)


def record_logprobs(sequence: Sequence, logprobs: TokenLogprobs) -> None:
    """Keep the log-probabilities of a token that is about to be appended."""
    sequence.cumulative_logprob += next(iter(logprobs.values())).logprob  # the sampled token comes first
    if sequence.params.logprobs is not None:
        sequence.logprobs.append(logprobs)

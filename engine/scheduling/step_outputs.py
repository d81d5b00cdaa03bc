"""step_outputs: what a step generated; requests with ``best_of`` or beams get their best answers at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.outputs import EngineOutput, FinishReason, StepOutputs
from engine.sequence import Sequence, SequenceGroup

__all__ = ["step_outputs"]


def step_outputs(
    updated: Iterable[Sequence],
    num_accepted: Mapping[Sequence, int],
    predicted: Mapping[Sequence, tuple[int, int]] | None = None,
) -> StepOutputs:
    """Return the outputs of a step.

    Args:
        updated: the sequences that sampled a token in the step, or ended without one.
        num_accepted: accepted draft tokens that some of them got in addition.
        predicted: of drafts from the prediction of a request: the accepted and the rejected tokens.
    """
    step = StepOutputs()
    request_ids, token_ids, outputs = step.request_ids, step.token_ids, step.others
    last: dict[SequenceGroup, EngineOutput] = {}  # the last output of each group that has ended
    for sequence in updated:
        group = sequence.group
        if sequence.has_plain_outputs and sequence.finish_reason is None and sequence not in num_accepted:
            request_ids.append(group.request.request_id)
            token_ids.append(sequence.token_ids[-1])
            continue
        has_ended = sequence.is_finished and group.is_finished
        if not group.outputs_at_end:
            has_token = not sequence.has_failed or sequence in num_accepted
            outputs.append(_sampled_output(sequence, has_token + num_accepted.get(sequence, 0)))
            if predicted and sequence in predicted:
                outputs[-1].num_accepted_predicted, outputs[-1].num_rejected_predicted = predicted[sequence]
        elif has_ended and group not in last:
            outputs += _best_answers(group)
        if has_ended:
            last[group] = outputs[-1]
    for group, output in last.items():
        output.is_last, output.timing = True, group.timing
    return step


def _sampled_output(sequence: Sequence, count: int) -> EngineOutput:
    """Return the output with the last ``count`` tokens of a sequence: none if it ended without one."""
    params = sequence.params
    num_generated = sequence.num_output_tokens - sequence.group.num_resumed_tokens
    is_first = num_generated == count
    has_prompt_logprobs = params.prompt_logprobs is not None and sequence.index == 0 and is_first
    sequence.has_plain_outputs = not sequence.index and not params.needs_logprobs
    return EngineOutput(
        sequence.group.request_id,
        sequence.index,
        sequence.token_ids[len(sequence.token_ids) - count :],
        sequence.finish_reason,
        sequence.stop_reason,
        sequence.num_cached_tokens,
        logprobs=sequence.logprobs[len(sequence.logprobs) - count :] if params.logprobs is not None and count else None,
        prompt_logprobs=sequence.group.prompt_logprobs if has_prompt_logprobs else None,
        cumulative_logprob=sequence.cumulative_logprob if params.needs_logprobs else None,
        timing=sequence.group.timing if is_first else None,
    )


def _best_answers(group: SequenceGroup) -> list[EngineOutput]:
    """Return the ``n`` best answers of a finished request, the best first."""
    if group.beams is not None:
        return _hypotheses(group)
    answers = sorted(group.sequences, key=_mean_logprob, reverse=True)[: group.params.n]
    return [
        EngineOutput(
            group.request_id,
            index,
            answer.output_token_ids,
            answer.finish_reason,
            answer.stop_reason,
            answer.num_cached_tokens,
            logprobs=answer.logprobs if group.params.logprobs is not None else None,
            prompt_logprobs=group.prompt_logprobs if group.params.prompt_logprobs is not None and not index else None,
            cumulative_logprob=answer.cumulative_logprob,
        )
        for index, answer in enumerate(answers)
    ]


def _mean_logprob(answer: Sequence) -> float:
    """Return the log-probability per token, by which the OpenAI API ranks answers; failed answers come last."""
    if answer.finish_reason is FinishReason.ABORT or not answer.num_output_tokens:
        return float("-inf")
    return answer.cumulative_logprob / answer.num_output_tokens


def _hypotheses(group: SequenceGroup) -> list[EngineOutput]:
    """Return the ``n`` best hypotheses of a search; an aborted answer with the reason replaces each missing one."""
    assert group.beams is not None
    first = group.sequences[0]
    outputs: list[EngineOutput] = []
    for index, hypothesis in enumerate(group.beams.hypotheses[: group.params.n]):
        last = hypothesis.token_ids[-1]
        outputs.append(
            EngineOutput(
                group.request_id,
                index,
                hypothesis.token_ids,
                FinishReason.STOP if hypothesis.ended_by_token else FinishReason.LENGTH,
                last if hypothesis.ended_by_token and last in (group.params.stop_token_ids or ()) else None,
                first.num_cached_tokens,
                cumulative_logprob=hypothesis.cumulative_logprob,
            )
        )
    reason = first.stop_reason or "the search found no further answer: too few tokens are allowed"
    outputs += [
        EngineOutput(group.request_id, index, [], FinishReason.ABORT, reason, first.num_cached_tokens)
        for index in range(len(outputs), group.params.n)
    ]
    return outputs

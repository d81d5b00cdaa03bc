"""AnswerChecks: the answers of a request are those of an undisturbed engine, and end for the right reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.outputs import EngineOutput, FinishReason
from engine.sequence import SequenceGroup
from tests.engine.shadow import ShadowRunner
from tests.engine.shadow_model import next_token, token_logprob

__all__ = ["NO_CHOICE", "AnswerChecks", "Expected"]

NO_CHOICE = "there is no token to go on with"


@dataclass(slots=True)
class Expected:
    """An unfinished request: the answers of an undisturbed engine, and the outputs so far."""

    prompt: list[int]
    salt: str
    group: SequenceGroup
    answers: list[list[int]]
    got: dict[int, list[int]] = field(default_factory=dict)
    held_back: list[EngineOutput] = field(default_factory=list)


class AnswerChecks:
    """Compares the outputs of a request with what is expected.

    Args:
        runner: the shadow runner, which says what an undisturbed engine answers.
        counts: what has happened, and how often.
        may_drop: whether a request may lose an answer for want of blocks (colliding hashes prevent sharing).
    """

    def __init__(self, runner: ShadowRunner, counts: Counter[str], *, may_drop: bool) -> None:
        self._runner = runner
        self._counts = counts
        self._may_drop = may_drop

    def receive(self, expected: Expected, output: EngineOutput) -> None:
        """Check one output of a request."""
        assert 0 <= output.index < expected.group.params.n
        if expected.group.outputs_at_end:
            expected.held_back.append(output)
        else:
            self._check_answer(expected, output)
        if output.prompt_logprobs is not None:
            self._check_prompt_logprobs(expected, output)
        if output.is_last:
            assert expected.group.is_finished
            if expected.group.outputs_at_end:
                self._check_best(expected)

    def undisturbed(self, prompt: list[int], group: SequenceGroup) -> list[list[int]]:
        """Return the answers, or hypotheses, of an engine that runs nothing else."""
        params, salt = group.params, group.request.cache_key
        if params.uses_beam_search:
            hypotheses = self._runner.search(prompt, params, group.max_total_tokens, salt)
            return [hypothesis.token_ids for hypothesis in hypotheses]
        return [self._draw(prompt, group, index) for index in range(params.num_sequences)]

    def _draw(self, prompt: list[int], group: SequenceGroup, index: int) -> list[int]:
        tokens = list(prompt)
        prefix: object = self._runner.ids.chain(group.request.cache_key, prompt)[-1]
        while True:
            assert isinstance(prefix, int)
            tokens.append(next_token(prefix, index))
            count = len(tokens) - len(prompt)
            is_stopped = tokens[-1] in group.stop_token_ids and count > group.params.min_tokens
            if is_stopped or len(tokens) >= group.max_total_tokens:
                return tokens[len(prompt) :]
            prefix = self._runner.ids.chain(prefix, tokens[-1:])[0]

    def _check_answer(self, expected: Expected, output: EngineOutput) -> None:
        got = expected.got.setdefault(output.index, [])
        got += output.token_ids
        wanted = expected.answers[output.index]
        assert got == wanted[: len(got)], f"{output.request_id} answers {got} instead of {wanted}"
        if output.finish_reason is FinishReason.ABORT:
            self._check_abort(output)
        elif output.finish_reason is not None:
            assert got == wanted, f"{output.request_id} ends at {got} instead of {wanted}"
            self._check_reason(expected, output, wanted)
        else:
            assert len(got) < len(wanted), f"{output.request_id} continues after its end"

    def _check_abort(self, output: EngineOutput) -> None:
        is_dropped = str(output.stop_reason).startswith("the KV cache cannot hold all answers")
        assert output.stop_reason == NO_CHOICE or (is_dropped and self._may_drop), output.stop_reason
        self._counts["dropped"] += is_dropped

    def _check_reason(self, expected: Expected, output: EngineOutput, tokens: list[int]) -> None:
        group = expected.group
        is_stop = tokens[-1] in group.stop_token_ids and (len(tokens) > group.params.min_tokens or group.beams)
        assert output.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _check_best(self, expected: Expected) -> None:
        """Compare the answers that come at the end: hypotheses of a search, or the best of several."""
        group, outputs = expected.group, expected.held_back
        assert [output.index for output in outputs] == list(range(len(outputs)))
        has_failed = [sequence.has_failed for sequence in group.sequences]
        if group.beams is not None:
            self._counts["beam searches"] += 1
            wanted = expected.answers[: group.params.n]
            if any(has_failed):  # then the hypotheses found before come
                best_tokens = [hypothesis.token_ids for hypothesis in group.beams.hypotheses[: group.params.n]]
                wanted = [*best_tokens, *[[]] * (group.params.n - len(best_tokens))]
            assert [output.token_ids for output in outputs] == wanted
        else:
            self._counts["best of several"] += 1
            answers = [sequence.output_token_ids for sequence in group.sequences]
            for answer, whole, failed in zip(answers, expected.answers, has_failed, strict=True):
                assert answer == (whole[: len(answer)] if failed else whole)
            scores = [
                float("-inf") if failed else self._mean_logprob(expected, index, answer)
                for index, (answer, failed) in enumerate(zip(answers, has_failed, strict=True))
            ]
            best = sorted(range(len(answers)), key=lambda index: -scores[index])[: group.params.n]
            assert [output.token_ids for output in outputs] == [answers[index] for index in best]
        for output in outputs:
            if output.finish_reason is FinishReason.ABORT:
                self._check_abort(output)
            else:
                self._check_reason(expected, output, output.token_ids)

    def _mean_logprob(self, expected: Expected, index: int, answer: list[int]) -> float:
        chain = self._runner.ids.chain(expected.salt, expected.prompt + answer)[len(expected.prompt) - 1 : -1]
        return sum(token_logprob(prefix, index) for prefix in chain) / len(answer)

    def _check_prompt_logprobs(self, expected: Expected, output: EngineOutput) -> None:
        assert output.prompt_logprobs is not None
        chain = self._runner.ids.chain(expected.salt, expected.prompt)
        wanted = [token_logprob(prefix) for prefix in chain[:-1]]
        logprobs = [
            position[token].logprob
            for position, token in zip(output.prompt_logprobs, expected.prompt, strict=True)
            if position
        ]
        assert output.prompt_logprobs[0] is None
        assert logprobs == wanted, "log-probabilities of prompt tokens are missing or come twice"
        self._counts["prompt logprobs"] += 1

"""BeamSearch against transformers' own beam search, on a model whose logits are a table."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from engine.sampling.beam_search import BeamSearch, Candidates

VOCAB_SIZE = 12
PROMPT = [3, 1, 4]


class TableConfig(PretrainedConfig):
    """The fields that ``generate`` reads of a config."""

    model_type = "table"
    vocab_size = VOCAB_SIZE


class TableModel(PreTrainedModel, GenerationMixin):
    """The next token depends on the last two, by a random table."""

    config_class = TableConfig

    def __init__(self, seed: int) -> None:
        super().__init__(TableConfig())
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, generator=generator))

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **options: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutput:
        before = torch.cat([input_ids[:, :1], input_ids[:, :-1]], dim=1)
        return CausalLMOutput(logits=self.table[before, input_ids])

    def candidates(self, token_ids: list[int], count: int) -> Candidates:
        """Return a beam's most likely next tokens and their log-probabilities."""
        logprobs = self.table[token_ids[-2], token_ids[-1]].log_softmax(dim=0)
        top = logprobs.topk(min(count, VOCAB_SIZE))
        return top.indices.tolist(), top.values.tolist()


def search(model: TableModel, beams: BeamSearch, stops: frozenset[int], max_tokens: int) -> None:
    """Run a search to its end."""
    continuing = [list(PROMPT)]
    while not beams.is_done:
        count = max(2, 1 + len(stops)) * beams.beam_width
        candidates = [model.candidates(beam, count) for beam in continuing]
        limit = len(PROMPT) + max_tokens
        chosen = beams.advance(continuing, candidates, stop_token_ids=stops, max_total_tokens=limit)
        continuing = [[*continuing[beam.parent], beam.token_id] for beam in chosen]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("stops", [(), (0,), (0, 5)])
@torch.inference_mode()
def test_hypotheses_and_scores_are_those_of_transformers(
    early_stopping: bool | Literal["never"], length_penalty: float, stops: tuple[int, ...]
) -> None:
    for seed in range(4):
        model = TableModel(seed).eval()
        for width in (2, 4):
            expected = model.generate(
                torch.tensor([PROMPT]),
                generation_config=GenerationConfig(
                    num_beams=width,
                    num_return_sequences=width,
                    do_sample=False,
                    max_new_tokens=8,
                    use_cache=False,
                    early_stopping=early_stopping,
                    length_penalty=length_penalty,
                    pad_token_id=VOCAB_SIZE - 1,
                    eos_token_id=list(stops) or None,
                    return_dict_in_generate=True,
                    output_scores=True,
                ),
            )
            beams = BeamSearch(width, length_penalty, early_stopping, len(PROMPT))
            search(model, beams, frozenset(stops), max_tokens=8)
            outputs = expected.sequences[:, len(PROMPT) :].tolist()
            for hypothesis, output, score in zip(beams.hypotheses, outputs, expected.sequences_scores, strict=True):
                size = len(hypothesis.token_ids)
                assert hypothesis.token_ids == output[:size]
                assert set(output[size:]) <= {VOCAB_SIZE - 1}
                assert hypothesis.score == pytest.approx(score.item(), rel=1e-5)


@torch.inference_mode()
def test_one_beam_is_a_greedy_search() -> None:
    for seed in range(10):
        model = TableModel(seed)
        beams = BeamSearch(1, 1.0, False, len(PROMPT))
        search(model, beams, frozenset({0}), max_tokens=6)
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + 6 and tokens[len(PROMPT) :][-1:] != [0]:
            tokens.append(model.candidates(tokens, 1)[0][0])
        assert beams.hypotheses[0].token_ids == tokens[len(PROMPT) :]


def test_a_hypothesis_says_whether_a_token_or_its_length_ended_it() -> None:
    beams = BeamSearch(2, 1.0, False, 1)
    continuing = beams.advance(
        [[7]], [([0, 1, 2, 3], [-0.1, -0.2, -0.3, -0.4])], stop_token_ids=frozenset({0}), max_total_tokens=3
    )
    assert [beam.token_id for beam in continuing] == [1, 2]
    beams.advance(
        [[7, 1], [7, 2]],
        [([4, 5, 6, 8], [-0.1, -5.0, -5.0, -5.0])] * 2,
        stop_token_ids=frozenset({0}),
        max_total_tokens=3,
    )
    assert beams.is_done
    assert {tuple(hypothesis.token_ids): hypothesis.ended_by_token for hypothesis in beams.hypotheses} == {
        (0,): True,
        (1, 4): False,
    }


def test_a_stop_token_after_the_first_beam_width_candidates_ends_no_hypothesis() -> None:
    beams = BeamSearch(2, 1.0, False, 1)
    beams.advance([[7]], [([1, 2, 0, 3], [-0.1, -0.2, -0.3, -0.4])], stop_token_ids=frozenset({0}), max_total_tokens=9)
    assert not beams.hypotheses


def test_with_a_negative_length_penalty_a_beam_counts_with_its_present_length() -> None:
    """Every further token lowers its score, so the score at the maximum length is no upper bound."""
    beams = BeamSearch(2, -1.0, "never", 1)
    continuing = [[7]]
    for candidates in ([([1, 0, 2], [-0.1, -2.0, -3.0])], [([3, 0, 4], [-0.1, -1.0, -9.0]), ([5, 6, 8], [-9.0] * 3)]):
        chosen = beams.advance(continuing, candidates, stop_token_ids=frozenset({0}), max_total_tokens=100)
        continuing = [[*continuing[beam.parent], beam.token_id] for beam in chosen]
    assert [hypothesis.token_ids for hypothesis in beams.hypotheses] == [[0], [1, 0]]  # with scores of -2.0 and -2.2
    assert not beams.is_done  # the best beam would have -0.4 now

"""What the engine drafts with an EAGLE-3 head is what the reference computes of the same weights, without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.eagle3.cpu_eagle3_head import CpuEagle3Head
from engine.models.eagle3.eagle3_config import Eagle3Config
from engine.sampling_params import SamplingParams
from engine.worker.drafting import eagle3_decoder
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from kernels.cpu.library import library
from tests.engine.models.eagle3.eagle3_heads import HEAD_FORMS, Eagle3Oracle
from tests.engine.oracle import make_llm, run
from tests.engine.worker.drafting.draft_logits import DraftLogits

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50], list(range(20, 58))]
NUM_TOKENS = 3  # of a draft
TOLERANCE = 2e-5  # of logits up to 7, in float32


def drafted(oracle: Eagle3Oracle, path: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> DraftLogits:
    """Return the logits of all drafts for some answers, in chunks of prompts and in a batch."""
    logits = DraftLogits(monkeypatch)
    speculation = oracle.speculation(path, NUM_TOKENS)
    llm = make_llm(path, speculative_config=speculation, max_num_batched_tokens=16, max_num_seqs=4, **options)
    run(llm, PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    return logits


@pytest.mark.parametrize("name", HEAD_FORMS)
def test_logits_of_every_draft_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Eagle3Oracle(HEAD_FORMS[name])
    logits = drafted(oracle, oracle.save(tmp_path), monkeypatch)
    for num_drafted in range(NUM_TOKENS):
        assert logits.largest_error(oracle, num_drafted) < TOLERANCE


@pytest.mark.parametrize(("options", "tolerance"), [({}, TOLERANCE), ({"dtype": "bfloat16"}, 0.5)])
def test_the_embedding_of_a_model_with_tied_weights(
    options: dict[str, Any], tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read from the model's packed head."""
    oracle = Eagle3Oracle(replace(HEAD_FORMS["two layers"], family="qwen3"))
    assert oracle.model.config.tie_word_embeddings
    logits = drafted(oracle, oracle.save(tmp_path), monkeypatch, **options)
    assert logits.largest_error(oracle, 0) < tolerance


Plant = Callable[[pytest.MonkeyPatch], None]


def _states_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    keep = HiddenStateDecoder.keep

    def one_earlier(head: HiddenStateDecoder, hidden: torch.Tensor, slots: torch.Tensor, cache: Any) -> None:
        keep(head, hidden.roll(1, 0), slots, cache)

    patch.setattr(HiddenStateDecoder, "keep", one_earlier)


def _after_the_layers(patch: pytest.MonkeyPatch) -> None:
    layers_of = Eagle3Config.aux_layers_of

    def later(config: Eagle3Config, num_layers: int) -> tuple[int, ...]:
        return tuple(layer + 1 for layer in layers_of(config, num_layers))

    patch.setattr(Eagle3Config, "aux_layers_of", later)


def _layers_exchanged(patch: pytest.MonkeyPatch) -> None:
    states = CpuEagle3Head.fuse

    def exchanged(head: CpuEagle3Head, hidden: torch.Tensor) -> torch.Tensor:
        first, second, third = hidden.chunk(3, dim=1)
        return states(head, torch.cat((second, first, third), dim=1))

    patch.setattr(CpuEagle3Head, "fuse", exchanged)


def _without(norm: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        normed = CpuEagle3Head._normed

        def without(head: CpuEagle3Head, name: str, values: torch.Tensor) -> torch.Tensor:
            return values if name == norm else normed(head, name, values)

        patch.setattr(CpuEagle3Head, "_normed", without)

    return plant


def _other_residual(patch: pytest.MonkeyPatch) -> None:
    read = eagle3_decoder.read_eagle3_config
    patch.setattr(eagle3_decoder, "read_eagle3_config", lambda path: replace(read(path), norm_before_residual=True))


def _embeddings_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    embed = CpuEagle3Head.embed
    patch.setattr(CpuEagle3Head, "embed", lambda head, token_ids: embed(head, token_ids.roll(1)))


def _ids_of_the_head(patch: pytest.MonkeyPatch) -> None:
    set_token_ids = CpuEagle3Head.set_token_ids
    patch.setattr(
        CpuEagle3Head, "set_token_ids", lambda head, ids: set_token_ids(head, torch.arange(len(ids), dtype=ids.dtype))
    )


def _keys_in_other_slots(patch: pytest.MonkeyPatch) -> None:
    predict = CpuEagle3Head.predict

    def rolled(head: CpuEagle3Head, token_ids: torch.Tensor, hidden: torch.Tensor, positions: Any, context: Any) -> Any:
        slots = context.metadata.slot_mapping
        slots.copy_(slots.roll(1))
        return predict(head, token_ids, hidden, positions, context)

    patch.setattr(CpuEagle3Head, "predict", rolled)


PLANTS: dict[str, Plant] = {
    "states of the next token": _states_of_the_next_token,
    "hidden states after the layers": _after_the_layers,
    "layers are exchanged": _layers_exchanged,
    "the norm of embeddings is forgotten": _without("input_layernorm"),
    "the norm of states is forgotten": _without("hidden_norm"),
    "the residual stream is normalized": _other_residual,
    "embeddings of the token before": _embeddings_of_the_token_before,
    "the head's own ids": _ids_of_the_head,
    "keys and values in the slots of other tokens": _keys_in_other_slots,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Eagle3Oracle()
    path = oracle.save(tmp_path)
    PLANTS[plant](monkeypatch)
    assert drafted(oracle, path, monkeypatch).largest_error(oracle, 0) > 100 * TOLERANCE


def test_a_second_draft_token_follows_the_output_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Eagle3Oracle()
    path = oracle.save(tmp_path)
    monkeypatch.setattr(CpuEagle3Head, "next_states", lambda head, hidden: head.normed(hidden))
    logits = drafted(oracle, path, monkeypatch)
    assert logits.largest_error(oracle, 0) < TOLERANCE
    assert logits.largest_error(oracle, 1) > 100 * TOLERANCE

"""What the engine drafts with a layer of multi-token prediction is what transformers computes of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.decoder.coded_plan import CodedPlan
from engine.models.decoder.cpu_decoder import CpuDecoder
from engine.models.mtp import loader
from engine.models.mtp.cpu_mtp_head import CpuMtpHead
from engine.sampling_params import SamplingParams
from engine.worker.drafting.mtp_decoder import MtpDecoder
from kernels.cpu.library import library
from tests.engine.models.checkpoint.formats.quantised import is_linear
from tests.engine.models.mtp.mtp_families import MTP_FAMILIES, MtpOracle
from tests.engine.models.published.weight_formats import FORMS
from tests.engine.oracle import make_llm, run
from tests.engine.worker.drafting.draft_logits import DraftLogits

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

IN_MAKE_TEST = ("qwen3.5", "deepseek-v3", "mimo")
NAMES = [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.long) for name in MTP_FAMILIES]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [50], list(range(20, 58))]
NUM_TOKENS = 3  # of a draft
TOLERANCE = 1e-4  # of logits of about 5, in float32


def drafted(path: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> DraftLogits:
    """Return the logits of all drafts for some answers, in chunks of prompts and in a batch."""
    logits = DraftLogits(monkeypatch)
    speculation = {"method": "mtp", "num_speculative_tokens": NUM_TOKENS}
    llm = make_llm(path, speculative_config=speculation, max_num_batched_tokens=16, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    run(llm, PROMPTS, params)
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_draft_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = MtpOracle(MTP_FAMILIES[name])
    logits = drafted(oracle.save(tmp_path), monkeypatch)
    for num_drafted in range(NUM_TOKENS):
        assert logits.largest_error(oracle, num_drafted) < TOLERANCE


def save_fp8(oracle: MtpOracle, path: Path) -> str:
    """Save a model with its layer in FP8 blocks, as Qwen3.5's are published, and give the oracle their values."""
    saved, file, config = oracle.save(path), path / "model.safetensors", path / "config.json"
    encode, fields, _ = FORMS["fp8 blocks"]
    weights, parameters = load_file(file), oracle.parameters()
    for name in [name for name in weights if is_linear(name)]:
        encoded, module = encode(name.removesuffix(".weight"), weights.pop(name)), name.removesuffix(".weight")
        weights |= {f"{module}.{end}": tensor.contiguous() for end, tensor in encoded.tensors.items()}
        with torch.no_grad():
            parameters[name].copy_(encoded.values)
    assert "mtp.layers.0.mlp.down_proj.weight_scale_inv" in weights
    save_file(weights, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return saved


def test_a_quantised_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = MtpOracle(MTP_FAMILIES["qwen3.5"])
    path = save_fp8(oracle, tmp_path)
    logits = drafted(path, monkeypatch)
    for num_drafted in range(NUM_TOKENS):
        assert logits.largest_error(oracle, num_drafted) < TOLERANCE


def test_a_layer_that_is_computed_from_its_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised activations make it less exact, as they make the model."""
    oracle = MtpOracle(MTP_FAMILIES["qwen3.5"])
    path = save_fp8(oracle, tmp_path)
    plans: list[frozenset[str]] = []
    planned = loader.plan_of

    def recording(*args: Any, **options: Any) -> CodedPlan:
        plan = planned(*args, **options)
        plans.append(plan.stored)
        return plan

    monkeypatch.setattr(loader, "plan_of", recording)
    logits = drafted(path, monkeypatch, dtype="bfloat16", quantization=None)
    assert any("mtp.layers.0.mlp.down_proj.weight" in stored for stored in plans)
    assert logits.largest_error(oracle, 0) < 0.3


Plant = Callable[[pytest.MonkeyPatch], None]


def _hidden_states_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    keep = MtpDecoder.keep

    def one_earlier(mtp: MtpDecoder, hidden: torch.Tensor, slots: torch.Tensor, cache: Any) -> None:
        keep(mtp, hidden.roll(1, 0), slots, cache)

    patch.setattr(MtpDecoder, "keep", one_earlier)


def _last_norm_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuDecoder, "normed", lambda model, hidden: hidden)


def _without(norm: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        set_weight = CpuMtpHead.set_weight

        def without(head: CpuMtpHead, name: str, weight: Any) -> None:
            set_weight(head, name, weight.zero_() if name == f"{norm}.weight" else weight)

        patch.setattr(CpuMtpHead, "set_weight", without)

    return plant


def _exchanged(patch: pytest.MonkeyPatch) -> None:
    init = CpuMtpHead.__init__

    def exchanged(head: CpuMtpHead, *args: Any, hidden_first: bool, **options: Any) -> None:
        init(head, *args, hidden_first=not hidden_first, **options)

    patch.setattr(CpuMtpHead, "__init__", exchanged)


def _embeddings_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    predict = CpuMtpHead.predict

    def one_earlier(head: CpuMtpHead, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        return predict(head, token_ids.roll(1), *rest)

    patch.setattr(CpuMtpHead, "predict", one_earlier)


def _keys_in_other_slots(patch: pytest.MonkeyPatch) -> None:
    predict = CpuMtpHead.predict

    def rolled(head: CpuMtpHead, token_ids: torch.Tensor, hidden: torch.Tensor, positions: Any, context: Any) -> Any:
        slots = context.metadata.slot_mapping
        slots.copy_(slots.roll(1))
        return predict(head, token_ids, hidden, positions, context)

    patch.setattr(CpuMtpHead, "predict", rolled)


PLANTS: dict[str, Plant] = {
    "hidden states of the next token": _hidden_states_of_the_next_token,
    "the model's last norm is forgotten": _last_norm_forgotten,
    "the norm of embeddings is forgotten": _without("embedding_norm"),
    "the norm of hidden states is forgotten": _without("hidden_norm"),
    "embedding and hidden state are exchanged": _exchanged,
    "embeddings of the token before": _embeddings_of_the_token_before,
    "keys and values in the slots of other tokens": _keys_in_other_slots,
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("deepseek-v3", marks=pytest.mark.long)])
def test_planted_faults_are_found(name: str, plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = MtpOracle(MTP_FAMILIES[name])
    path = oracle.save(tmp_path)
    PLANTS[plant](monkeypatch)
    assert drafted(path, monkeypatch).largest_error(oracle, 0) > 100 * TOLERANCE


def _from_the_hidden_state_before(patch: pytest.MonkeyPatch) -> None:
    compute = MtpDecoder.compute

    def stale(mtp: MtpDecoder, *args: Any) -> Any:
        logits = compute(mtp, *args)
        if logits is not None:
            mtp.last_hidden = mtp.last_hidden.roll(1, 1)
        return logits

    patch.setattr(MtpDecoder, "compute", stale)


def test_a_second_draft_token_follows_the_output_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = MtpOracle(MTP_FAMILIES["qwen3.5"])
    path = oracle.save(tmp_path)
    _from_the_hidden_state_before(monkeypatch)
    logits = drafted(path, monkeypatch)
    assert logits.largest_error(oracle, 0) < TOLERANCE
    assert logits.largest_error(oracle, 1) > 100 * TOLERANCE

"""What an MTP layer or an EAGLE-3 head drafts depends on the sequence alone, whatever the engine has done with its
blocks: any key, value or hidden state that is stale, missing or in the wrong slot would show.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from engine.kv.page_memory import PageMemory
from engine.sampling_params import SamplingParams
from engine.worker.drafting.cpu_hidden_state_model import CpuHiddenStateModel
from engine.worker.drafting.hidden_state_decoder import HiddenStateDecoder
from engine.worker.drafting.prefix_marks import PrefixMarks
from kernels.cpu.library import library
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.eagle3.eagle3_heads import Eagle3Oracle
from tests.engine.models.mtp.mtp_families import MTP_FAMILIES, MtpOracle
from tests.engine.models.mtp.test_against_transformers import TOLERANCE
from tests.engine.models.test_speculative_generation import DraftCounter
from tests.engine.oracle import Activity, answers, make_llm, random_tokens, run
from tests.engine.worker.drafting.draft_logits import DraftLogits, DraftOracle, difference

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

SPECULATION = {"method": "mtp", "num_speculative_tokens": 3}
SMALL_POOL = {"block_size": 4, "num_blocks": 52, "max_num_seqs": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 8},
    "preempted": SMALL_POOL,
    "swapped": SMALL_POOL | {"swap_space_gib": 0.05, "enable_prefix_caching": False},
    "evicted to the host": SMALL_POOL | {"max_num_seqs": 4, "swap_space_gib": 0.05},
    "overlapping": {"async_scheduling": True},
}
IN_MAKE_TEST = (
    *(("mimo", "preempted"), ("mimo", "evicted to the host"), ("qwen3.5", "swapped")),
    *(("eagle3", "preempted"), ("eagle3", "evicted to the host"), ("eagle3", "chunks")),
)
NUM_COMPARED = 60  # of the draft tokens of a setting


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of them with the same beginning, with greedy and drawn answers."""
    rng = random.Random(5)
    shared = random_tokens(rng, 21)
    prompts = [shared * (index % 2) + random_tokens(rng, rng.randint(1, 30)) for index in range(12)]
    params = [
        SamplingParams(
            temperature=0.9 * (index % 3 > 0),
            seed=index,
            max_tokens=14 + index,
            frequency_penalty=0.4 * (index % 5 == 2),
            logprobs=1 if index % 4 == 0 else None,
            ignore_eos=True,
        )
        for index in range(12)
    ]
    return prompts, params


def new_oracle(name: str) -> DraftOracle:
    return Eagle3Oracle() if name == "eagle3" else MtpOracle(MTP_FAMILIES[name])


def largest_error(oracle: DraftOracle, logits: DraftLogits) -> float:
    """Return the largest difference of some of the draft tokens' logits from the oracle's."""
    assert len(logits.seen) > 200
    some = random.Random(0).sample(logits.seen, NUM_COMPARED)
    return max(difference(oracle.draft_logits(tokens, drafted), row) for tokens, drafted, row in some)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting) if (name, setting) in IN_MAKE_TEST else pytest.param(name, setting, marks=pytest.mark.long)
        for name in ("mimo", "qwen3.5", "deepseek-v3", "eagle3")
        for setting in SETTINGS
    ],
)
def test_drafts_depend_on_the_sequence_alone(
    name: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, drafts = new_oracle(name), DraftCounter(monkeypatch)
    path = oracle.save(tmp_path)
    expected = answers(run(make_llm(path), *requests()))
    logits = DraftLogits(monkeypatch)
    llm = make_llm(path, speculative_config=oracle.speculation(path, 3), **SETTINGS[setting])
    activity = Activity(llm)
    for _ in range(2):  # the second time from the prefix cache, and from the host
        assert answers(run(llm, *requests())) == expected
    print(f"{name}, {setting}: {drafts.num_accepted} of {drafts.num_drafted} tokens accepted, {activity}")
    assert largest_error(oracle, logits) < TOLERANCE
    if setting == "preempted":
        assert activity.num_recomputed
    if setting in ("swapped", "evicted to the host"):
        assert activity.num_swapped_in


Plant = Callable[[pytest.MonkeyPatch], None]


def _hidden_states_lost_on_the_host(patch: pytest.MonkeyPatch) -> None:
    swap_in = PageMemory.swap_in

    def without_hidden_states(memory: PageMemory, pairs: list[tuple[int, int]]) -> None:
        swap_in(memory, pairs)
        for _, page in pairs:
            memory.parts[-2][page] = 0.5

    patch.setattr(PageMemory, "swap_in", without_hidden_states)


def _drafts_marked_as_computed(patch: pytest.MonkeyPatch) -> None:
    chunk = CpuHiddenStateModel._chunk

    def marking(model: CpuHiddenStateModel, sequence: Any, draft: list[int], first: int, end: int) -> Any:
        made = chunk(model, sequence, draft, first, end)
        model._marks.write(sequence, first - 1, draft, made.slots)
        return made

    patch.setattr(CpuHiddenStateModel, "_chunk", marking)


def _tokens_that_are_not_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixMarks, "num_computed", lambda marks, sequence: sequence.num_tokens - 1)


def _hidden_states_of_recomputed_tokens_not_kept(patch: pytest.MonkeyPatch) -> None:
    keep = HiddenStateDecoder.keep

    def of_decodes(mtp: HiddenStateDecoder, hidden: torch.Tensor, slots: torch.Tensor, cache: Any) -> None:
        if len(slots) < 9:
            keep(mtp, hidden, slots, cache)

    patch.setattr(HiddenStateDecoder, "keep", of_decodes)


@pytest.mark.parametrize("name", ["mimo", "eagle3"])
@pytest.mark.parametrize(
    ("plant", "setting"),
    [
        (_hidden_states_lost_on_the_host, "swapped"),
        (_drafts_marked_as_computed, "chunks"),
        (_tokens_that_are_not_filled, "chunks"),
        (_hidden_states_of_recomputed_tokens_not_kept, "preempted"),
    ],
)
def test_planted_faults_are_found_and_change_no_answer(
    name: str, plant: Plant, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = new_oracle(name)
    path = oracle.save(tmp_path)
    expected = answers(run(make_llm(path), *requests()))
    plant(monkeypatch)
    logits = DraftLogits(monkeypatch)
    llm = make_llm(path, speculative_config=oracle.speculation(path, 3), **SETTINGS[setting])
    for _ in range(2):
        assert answers(run(llm, *requests())) == expected
    assert largest_error(oracle, logits) > 100 * TOLERANCE


# --- a layer that is always right -----------------------------------------------------------------------------------

BOS = 1


def save_predictable(path: Path) -> str:
    """Save a MiMo of one layer, whose layer of multi-token prediction is always right in texts that begin with BOS.

    The layer for further tokens has the weights of the model's only one, and reads the embedding alone. So for a token
    it computes what the model does, except that it sees no entry of the first token. No query of the model sees that
    token either: an element of keys is negative for BOS alone, and large queries multiply it.
    """
    model = build_model("qwen2", num_hidden_layers=1, use_sliding_window=False, rope_theta=1e6)
    hides_bos(model)
    layer, size = model.model.layers[0], model.config.hidden_size
    saved, prefix = save_checkpoint(model, path), "model.mtp_layers.0."
    weights = model.state_dict()
    ones = torch.ones(size)
    weights |= {f"{prefix}token_layernorm.weight": ones, f"{prefix}hidden_layernorm.weight": ones.clone()}
    weights[f"{prefix}input_proj.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), dim=1)
    weights[f"{prefix}final_layernorm.weight"] = model.model.norm.weight.data.clone()
    weights |= {prefix + name: weight.clone() for name, weight in layer.state_dict().items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = path / "config.json"
    own_code = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    config.write_text(json.dumps(json.loads(config.read_text()) | own_code))
    return saved


def hides_bos(model: PreTrainedModel) -> None:
    """Let no token of a model with one layer attend to BOS, and all embeddings be normalized already."""
    attention, size = model.model.layers[0].self_attn, model.config.hidden_size
    dim = attention.head_dim
    slowest = slice(dim // 2 - 1, None, dim)  # the element of each head that RoPE rotates least, by less than 0.006
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[0] = embedding[2]  # of padding, zeros
        embedding[:, -1] = 0.0
        embedding *= ((size - 1) / embedding.square().sum(dim=1, keepdim=True)).sqrt()
        embedding[:, -1] = 1.0
        embedding[BOS, -1] = -1.0
        model.model.layers[0].input_layernorm.weight.fill_(1.0)
        for projection in (attention.q_proj, attention.k_proj):
            for rows in (slowest, slice(dim - 1, None, dim)):
                projection.weight[rows] = 0.0
                projection.bias[rows] = 0.0
        attention.q_proj.bias[slowest] = 12.0
        attention.k_proj.weight[slowest, -1] = 12.0


@pytest.mark.parametrize(
    "setting", ["chunks", *(pytest.param(name, marks=pytest.mark.long) for name in SETTINGS if name != "chunks")]
)
def test_no_draft_is_rejected(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, path = DraftCounter(monkeypatch), save_predictable(tmp_path)
    prompts, params = requests()
    prompts = [[BOS, *prompt] for prompt in prompts]
    expected = answers(run(make_llm(path), prompts, params))
    llm = make_llm(path, speculative_config=SPECULATION, **SETTINGS[setting])
    for _ in range(2):
        assert answers(run(llm, prompts, params)) == expected
    assert drafts.num_accepted == drafts.num_drafted > 100


def test_answers_that_part_at_the_end_of_a_shared_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of the block has the key and value of one answer's first token: the others draft a bit worse."""
    drafts, path = DraftCounter(monkeypatch), save_predictable(tmp_path)
    prompts = [[BOS, *random_tokens(random.Random(seed), 31)] for seed in range(4)]
    params = [SamplingParams(temperature=0.9, n=4, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(4)]
    expected = answers(run(make_llm(path), prompts, params))
    passes: list[int] = []
    compute = HiddenStateDecoder.compute

    def counting(mtp: HiddenStateDecoder, token_ids: torch.Tensor, *rest: Any) -> Any:
        passes.append(len(token_ids))
        return compute(mtp, token_ids, *rest)

    monkeypatch.setattr(HiddenStateDecoder, "compute", counting)
    assert answers(run(make_llm(path, speculative_config=SPECULATION), prompts, params)) == expected
    assert 0.8 * drafts.num_drafted < drafts.num_accepted < drafts.num_drafted
    num_tokens = sum(map(len, prompts)) + 16 * 40
    assert sum(passes) < 2.5 * num_tokens, "the answers compute each other's tokens again and again"

"""With the C kernels, a request gets the same logits, bit for bit, and the same tokens, however it is computed: alone
or in a batch, in chunks, from the cache, after a preemption, on another replica, on any number of threads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from kernels.cpu.library import library
from kernels.cpu.linear import has_int8
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.checkpoint.formats import test_fp8 as of_fp8
from tests.engine.models.checkpoint.formats.quantised import save_quantised
from tests.engine.models.decoder.dense_families import save_dense_model
from tests.engine.models.decoder.gemma.gemma_families import save_gemma_model
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model
from tests.engine.models.gguf import converted
from tests.engine.oracle import Activity, random_tokens, run

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

NUM_PROMPTS = 200
MAX_TOKENS = 8
CHECK_EVERY = 50  # steps with many prompts: checks walk all requests and pools, and took half of the time
SMALL_POOL = {"block_size": 1, "num_blocks": 420, "max_num_seqs": 32}
ALONE = {"max_num_seqs": 1, "enable_prefix_caching": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "alone, two threads": ALONE | {"num_threads": 2},
    "alone, in chunks": ALONE | {"max_num_batched_tokens": 13},
    "alone, cached": {"max_num_seqs": 1},
    "batches of 12": {"max_num_seqs": 12, "enable_prefix_caching": False},
    "all at once": {"max_num_seqs": NUM_PROMPTS, "enable_prefix_caching": False},
    "all at once, shared": {"max_num_seqs": NUM_PROMPTS},
    "all at once, three threads": {"max_num_seqs": NUM_PROMPTS, "num_threads": 3},
    "chunks of 96": {"max_num_seqs": 12, "max_num_batched_tokens": 96},
    "chunks of 17": {"max_num_seqs": 8, "max_num_batched_tokens": 17},
    "limited prefills": {"max_num_seqs": 32, "long_prefill_threshold": 70},
    "blocks of 1": {"max_num_seqs": 16, "block_size": 1},
    "blocks of 48": {"max_num_seqs": 16, "block_size": 48},
    "blocks of 256, two threads": {"max_num_seqs": 16, "block_size": 256, "num_threads": 2},
    "preempted": SMALL_POOL | {"enable_prefix_caching": False},
    "preempted, cached": SMALL_POOL | {"max_num_batched_tokens": 96},
    "swapped": SMALL_POOL | {"swap_space_gib": 0.05},
    "evicted to the host": {"max_num_seqs": 8, "num_blocks": 80, "swap_space_gib": 0.05},
    "paced": {"max_num_seqs": 32, "max_decode_slowdown": 1.5},
    "warm": {"max_num_seqs": 32},
    "migrated": {"max_num_seqs": 16, "enable_prefix_caching": False},
    "migrated, warm": {"max_num_seqs": 16, "num_threads": 2},
}
FEW_SETTINGS = ("all at once, three threads", "chunks of 17", "swapped", "evicted to the host", "migrated, warm")
# Of a sequence's tokens so far: the bytes of the logits that follow.
Logits = dict[tuple[int, ...], bytes]


def prompts_and_params(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 300 tokens, half of which begin alike; half of the answers are greedy, half are seeded draws."""
    rng = random.Random(11)
    shared = random_tokens(rng, 150)
    prompts = [shared * (i % 2) + random_tokens(rng, rng.randint(1, 150)) for i in range(count)]
    params = [
        SamplingParams(temperature=0.0 if i % 4 < 2 else 0.8, top_p=0.9, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(count)
    ]
    return prompts, params


class LogitsRecorder:
    """Keeps the logits that every sampler sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: Logits = {}
        start = Sampler.start

        def recording(sampler: Sampler, logits: torch.Tensor, sequences: Sequence[Any], *rest: Any) -> Any:
            for row, sequence in zip(logits, sequences, strict=True):
                self._seen.setdefault(tuple(sequence.token_ids), row.numpy().tobytes())
            return start(sampler, logits, sequences, *rest)

        monkeypatch.setattr(Sampler, "start", recording)

    def take(self) -> Logits:
        """Return what was seen since the last call."""
        seen, self._seen = self._seen, {}
        return seen


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> LogitsRecorder:
    return LogitsRecorder(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 whose heads are wide enough that their products are added in several steps."""
    model = build_model("qwen3", head_dim=64)
    return save_checkpoint(model, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def checkpoint_with_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2-MoE, which also has a shared expert."""
    return save_checkpoint(build_model("qwen2_moe", head_dim=64), tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same Qwen3 in FP8, whose codes are multiplied in bfloat16."""
    model, path = build_model("qwen3", head_dim=64), tmp_path_factory.mktemp("fp8")
    return str(save_quantised(model, path, of_fp8.fp8_block, of_fp8.fp8()).path)


def make_llm(path: str, kind: str, **options: Any) -> LLM:
    dtypes = {"dtype": "float32"} if kind == "float32" else {"dtype": "bfloat16"}
    if kind in ("int8", "int4"):
        dtypes["quantization"] = kind
    fixed = {"device": "cpu", "skip_tokenizer_init": True, "num_threads": 1, "max_decode_slowdown": None}
    sizes = {} if "num_blocks" in options else {"kv_cache_memory": "64MiB"}
    return LLM(path, **fixed | dtypes | sizes | options)


def answer(path: str, kind: str, setting: str, count: int) -> list[list[int]]:
    """Answer the first ``count`` prompts in a setting."""
    prompts, params = prompts_and_params(count)
    llm = make_llm(path, kind, **SETTINGS.get(setting, ALONE))
    activity = Activity(llm, check_every=1 if count < NUM_PROMPTS else CHECK_EVERY)
    answers = [output.outputs[0].token_ids for output in run(llm, prompts, params)]
    if setting == "warm":
        again = run(llm, prompts, params)
        assert all(output.num_cached_tokens >= len(prompt) - 16 for output, prompt in zip(again, prompts, strict=True))
        assert [output.outputs[0].token_ids for output in again] == answers
    if setting.startswith("migrated"):
        answers = _continue_elsewhere(path, kind, setting, prompts, answers)
    if setting == "evicted to the host":
        num_loaded = activity.num_swapped_in
        again = run(llm, prompts, params)
        assert [output.outputs[0].token_ids for output in again] == answers
        assert all(output.num_cached_tokens >= len(prompt) - 16 for output, prompt in zip(again, prompts, strict=True))
        assert activity.num_swapped_in > num_loaded
    assert (activity.num_swapped_out > 0) == (setting == "swapped")
    assert (activity.num_recomputed > 0) == setting.startswith("preempted")
    return answers


def _continue_elsewhere(
    path: str, kind: str, setting: str, prompts: list[list[int]], answers: list[list[int]]
) -> list[list[int]]:
    """Continue greedy answers after their first half on another engine, which computes that as a part of the prompt."""
    other = make_llm(path, kind, **SETTINGS[setting])
    half = MAX_TOKENS // 2
    greedy = [i for i in range(len(prompts)) if i % 4 < 2]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS - half, ignore_eos=True)
    outputs = run(other, [prompts[i] + answers[i][:half] for i in greedy], params)
    continued = dict(zip(greedy, outputs, strict=True))
    return [
        whole if i not in continued else whole[:half] + continued[i].outputs[0].token_ids
        for i, whole in enumerate(answers)
    ]


def check(recorder: LogitsRecorder, path: str, kind: str, settings: Sequence[str], count: int) -> None:
    """Compare each setting with every prompt computed alone, whole, on one thread."""
    expected = answer(path, kind, "alone", count)
    logits = recorder.take()
    assert len(logits) > count * MAX_TOKENS * 0.9
    for setting in settings:
        assert answer(path, kind, setting, count) == expected, setting
        seen = recorder.take()
        assert seen.keys() == logits.keys(), setting
        assert [ids for ids in seen if seen[ids] != logits[ids]] == [], setting


KINDS = ["float32", "bfloat16", "int8", "int4"]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("bfloat16", "int4") else pytest.mark.long) for kind in KINDS]
)
def test_forty_answers_in_a_few_settings(recorder: LogitsRecorder, checkpoint: str, kind: str) -> None:
    if kind == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    check(recorder, checkpoint, kind, FEW_SETTINGS, 40)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "int8" else pytest.mark.long) for kind in KINDS]
)
def test_forty_answers_of_experts_in_a_few_settings(
    recorder: LogitsRecorder, checkpoint_with_experts: str, kind: str
) -> None:
    if kind == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    check(recorder, checkpoint_with_experts, kind, FEW_SETTINGS, 40)


@pytest.mark.parametrize("family", ["granite", "olmo2", "gemma2"])
def test_families_with_norms_of_outputs_multipliers_and_soft_caps(
    recorder: LogitsRecorder, family: str, tmp_path: Path
) -> None:
    _, path = save_dense_model(family, tmp_path)
    check(recorder, path, "bfloat16", ("all at once, three threads", "chunks of 17", "migrated, warm"), 20)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma-4-e4b", "bfloat16"),
        *(pytest.param("gemma-4-26b-a4b", kind, marks=pytest.mark.long) for kind in KINDS),
        *(pytest.param("gemma-4-31b", kind, marks=pytest.mark.long) for kind in KINDS[:2]),
    ],
)
def test_layers_that_differ_in_their_heads(recorder: LogitsRecorder, name: str, kind: str, tmp_path: Path) -> None:
    """Also with a dense feed-forward and experts side by side."""
    if kind == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    _, path = save_gemma_model(name, tmp_path)
    check(recorder, path, kind, ("all at once, three threads", "chunks of 17", "migrated, warm"), 10)


@pytest.mark.parametrize(
    "family",
    ["qwen3.5", *(pytest.param(name, marks=pytest.mark.long) for name in ("lfm2-moe", "falcon-h1", "nemotron-3-nano"))],
)
def test_recurrent_layers_in_a_few_settings(recorder: LogitsRecorder, family: str, tmp_path: Path) -> None:
    """Prompts go on from snapshots, at which the chunks of others do not end."""
    _, path = save_recurrent_model(family, tmp_path)
    settings = ("all at once, three threads", "chunks of 17", "alone, cached", "migrated, warm")
    check(recorder, path, "bfloat16", settings, 8)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3moe", "qwen35"))]
)
def test_codes_of_gguf_files_in_a_few_settings(recorder: LogitsRecorder, name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    converted.write_gguf(converted.build_model(name, vocab_size=400), name, path)
    check(recorder, str(path), "bfloat16", ("all at once, three threads", "chunks of 17", "migrated, warm"), 12)


def test_codes_that_are_floats_in_a_few_settings(recorder: LogitsRecorder, fp8_checkpoint: str) -> None:
    check(recorder, fp8_checkpoint, "bfloat16", FEW_SETTINGS, 40)


@pytest.mark.exhaustive("more prompts in the settings of which CI compares a few")
@pytest.mark.timeout(600)
def test_two_hundred_answers_of_codes_that_are_floats_in_every_setting(
    recorder: LogitsRecorder, fp8_checkpoint: str
) -> None:
    check(recorder, fp8_checkpoint, "bfloat16", list(SETTINGS), NUM_PROMPTS)


@pytest.mark.exhaustive("a hundred answers; CI compares forty of each kind of model")
def test_a_hundred_answers_in_every_setting(recorder: LogitsRecorder, checkpoint: str) -> None:
    check(recorder, checkpoint, "bfloat16", list(SETTINGS), 100)


@pytest.mark.exhaustive("more prompts and dtypes in the 21 settings that CI runs with a hundred answers")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_answers_in_every_setting(recorder: LogitsRecorder, checkpoint: str, kind: str) -> None:
    if kind == "int8" and not has_int8():
        pytest.skip("the processor does not multiply int8")
    assert len(SETTINGS) == 21
    check(recorder, checkpoint, kind, list(SETTINGS), NUM_PROMPTS)


def test_speculation_changes_no_logits_of_other_tokens(recorder: LogitsRecorder, checkpoint: str) -> None:
    """Drafts are verified several at a time: their rows and those of plain decodes come from different kernels."""
    prompts = [ids * 6 for ids in ([5, 6, 7], [9, 8], [40, 41, 42, 43, 44])]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in run(make_llm(checkpoint, "bfloat16", **ALONE), prompts, params)]
    logits = recorder.take()
    drafting = make_llm(checkpoint, "bfloat16", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    assert [output.outputs[0].token_ids for output in run(drafting, prompts, params)] == plain
    assert all(logits[ids] == row for ids, row in recorder.take().items() if ids in logits)

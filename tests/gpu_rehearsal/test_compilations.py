"""After the warm-up no step makes Triton compile, on 132 multiprocessors, for shapes as large models have them.

Attention is not computed here, so contexts can be long. One shape is compiled to machine code for sm_90 by Triton
itself; for the others it says under which key it would compile.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.tiny_tokenizers import VOCAB_SIZE
from tests.gpu_rehearsal.code_lines import ROOT
from tests.gpu_rehearsal.rehearsal import Rehearsal
from tests.gpu_rehearsal.scenarios import watch

LONGEST = 18_000
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 2 * LONGEST}
WINDOW: dict[str, Any] = {"sliding_window": 3000, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Its first layer attends to everything, its second to a window.
    "windows": ("qwen2", {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, **WINDOW}),
    "Qwen3-8B": ("qwen3", {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}),
    "one KV head, groups of 7": ("qwen3", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80}),
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a model's name and its directory; made before a test simulates the GPU."""
    family, options = MODELS[request.param]
    model = build_model(family, **(SMALL | options))
    return request.param, save_checkpoint(model, tmp_path_factory.mktemp("checkpoint"))


def start(gpu: Rehearsal, path: str, **options: Any) -> LLM:
    return gpu.start(
        path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=LONGEST + 200 if gpu.launches.compiles else 9000,
        max_num_batched_tokens=2048,
        num_blocks=2 * LONGEST // 16,
        max_num_seqs=64,
        enforce_eager=True,  # graphs are captured with all contexts as long as they may be
        **options,
    )


def run(llm: LLM, lengths: list[int], max_tokens: int = 3) -> None:
    """Answer prompts of these lengths; a long one finds most of its blocks in the prefix cache."""
    rng = random.Random(0)
    text = [rng.randrange(3, VOCAB_SIZE) for _ in range(max(lengths))]
    prompts: Any = [{"prompt_token_ids": text[:length]} for length in lengths]
    params = SamplingParams(**GREEDY, max_tokens=max_tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)


def test_no_step_compiles(checkpoint: tuple[str, str], gpu: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = checkpoint
    gpu.launches.computes = False
    gpu.launches.compiles = name == "windows"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(ROOT, "build", "gpu-rehearsal", "triton")))
    llm = start(gpu, path)
    seen = watch(llm.engine, gpu.machine)
    gpu.launches.arguments.clear()
    for length in (1, 2, 3, 6, 15, 16, 17, 64, 300, 600, 1200, 2100, 4200, 8400):
        run(llm, [length])
    for lengths in ([1] * 16, [1] * 17, [5, 700, 1], [3000, 1, 2, 3], [20] * 48, [8400, 8400]):
        run(llm, lengths, max_tokens=2)
    if gpu.launches.compiles:
        run(llm, [LONGEST])
    gpu.machine.check()
    assert seen.steps["decode"] > 20
    attention = {"prefill_kernel", "plan_splits_kernel", "split_decode_kernel", "reduce_splits_kernel"}
    assert attention <= set(gpu.launches.counts)
    if gpu.launches.compiles:
        assert gpu.launches.num_compiled == len(gpu.launches.variants) > 10


@pytest.mark.parametrize("checkpoint", ["windows", "Qwen3-8B"], indirect=True)
def test_drafts_do_not_compile(checkpoint: tuple[str, str], gpu: Rehearsal) -> None:
    gpu.launches.computes = False
    llm = start(gpu, checkpoint[1], speculative_config=DRAFTS, max_decode_slowdown=None)
    seen = watch(llm.engine, gpu.machine)
    for prompts in ([[5, 6] * 20], [[5, 6] * 20, [7] * 500, [8, 9, 10] * 300]):
        params = SamplingParams(**GREEDY, max_tokens=12, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    gpu.machine.check()
    assert seen.steps["drafts"]


@pytest.fixture(scope="module")
def odd_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose vocabulary two ranks pad, to a multiple of 16."""
    model = build_model("qwen3", **(SMALL | {"vocab_size": VOCAB_SIZE - 1}))
    return save_checkpoint(model, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_padded_vocabulary_does_not_compile(odd_vocabulary: str, dtype: str, gpu: Rehearsal) -> None:
    """The logits of one sequence have the same stride as those of several."""
    llm = gpu.start(odd_vocabulary, dtype=dtype, skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=256)
    for options in GREEDY, {"temperature": 1.0}, {"top_k": 5}:
        for num_prompts in (1, 3):
            params = SamplingParams(max_tokens=3, ignore_eos=True, **options)
            llm.generate([{"prompt_token_ids": [5, 6, 7]}] * num_prompts, params, use_tqdm=False)
    gpu.machine.check()

"""An engine reads from storage what an earlier one has computed, bit by bit, and answers the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv.layer_cache import State
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.kv.tiers.disk_engines import shared_of, storage_of, tiers_of
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model
from tests.engine.oracle import answers, make_llm, random_tokens, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def save(family: str, path: Path) -> str:
    """Save a tiny model: qwen3 attends to everything, mistral to a window, qwen3.5 has recurrent layers."""
    if family == "qwen3.5":
        return save_recurrent_model(family, path)[1]
    return save_checkpoint(build_model(family), path)


def make(path: str, directory: Path | None, storage: str = "disk", **options: Any) -> LLM:
    tiers: dict[str, Any] = {}
    if directory is not None:
        tiers = {f"{storage}_cache_path": str(directory), f"{storage}_cache_gib": 0.02}
    llm = make_llm(path, **{"block_size": 4, "num_blocks": 200, "swap_space_gib": 0.01} | tiers | options)
    if directory is not None and storage == "shared":
        while not shared_of(llm.engine).is_on:  # until the first listing
            tiers_of(llm.engine).inbox.wait()
    return llm


def cached_bits(llm: LLM, prompt: list[int], num_blocks: int) -> list[torch.Tensor]:
    """Return the bits that each layer has cached of a text's first blocks; windows and states: of the last one."""
    engine = llm.engine
    assert engine.tiers is not None
    match = engine.block_manager.prefix_cache.match(engine.tiers.chain(prompt, ""))
    assert match.num_blocks >= num_blocks
    blocks = [match.block_id(index) for index in range(num_blocks)]
    cache = engine.runner.workers.local.kv_cache  # type: ignore[attr-defined]
    parts = []
    for layer, tensors in zip(engine.runner.workers.local.shard.model.layer_caches, cache.layers, strict=True):  # type: ignore[attr-defined]
        for tensor in tensors:
            if isinstance(layer, State):
                continue
            rows = blocks if layer.window is None else []
            parts.append(tensor[rows].contiguous().view(torch.uint8).clone())
    return parts


def check_two_models(tmp_path: Path, storage: str = "disk") -> None:
    """Assert that a model whose files have the names, sizes and headers of another one's gets none of its KV."""
    prompt, model = random_tokens(random.Random(7), 90), build_model("qwen3")
    path = save_checkpoint(model, tmp_path / "model")
    llm = make(path, tmp_path / "disk", storage)
    before = answers(run(llm, [prompt], GREEDY))
    llm.engine.close()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    save_checkpoint(model, tmp_path / "model")
    llm, alone = make(path, tmp_path / "disk", storage), make(path, None)
    expected = answers(run(alone, [prompt], GREEDY))
    assert expected != before
    try:
        assert answers(run(llm, [prompt], GREEDY)) == expected
    finally:
        llm.engine.close()


@pytest.mark.parametrize("storage", ["disk", "shared"])
def test_a_model_with_other_weights_of_the_same_sizes_finds_nothing(storage: str, tmp_path: Path) -> None:
    check_two_models(tmp_path, storage)


@pytest.mark.parametrize("storage", ["disk", "shared"])
def test_names_without_the_models_digest_are_detected(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv.tiers.tiers.model_digest", lambda config, info: b"any model")
    with pytest.raises(AssertionError):
        check_two_models(tmp_path, storage)


@pytest.mark.parametrize("storage", ["disk", "shared"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3.5"])
def test_a_restarted_engine_serves_a_prompt_from_storage(family: str, dtype: str, storage: str, tmp_path: Path) -> None:
    path, prompt = save(family, tmp_path / "model"), random_tokens(random.Random(7), 90)
    first = make(path, tmp_path / "disk", storage, dtype=dtype)
    expected = run(first, [prompt], GREEDY)
    bits = cached_bits(first, prompt, 20)
    first.engine.close()
    second = make(path, tmp_path / "disk", storage, dtype=dtype)
    assert storage_of(second.engine).num_blocks >= 22
    outputs = run(second, [prompt], GREEDY)
    assert answers(outputs) == answers(expected)
    assert outputs[0].num_cached_tokens >= 84
    assert all(map(torch.equal, cached_bits(second, prompt, 20), bits))
    second.engine.close()

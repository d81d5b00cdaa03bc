"""Which matrix computes the logits where config.json ties the head to the embedding: transformers' own choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.llm import LLM
from engine.models.decoder.decoder import Decoder
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.decoder.dense_families import build_dense_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROMPT = [5, 6, 7, 8]
BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: build_model("qwen3"),
    "qwen3_moe": lambda: build_model("qwen3_moe", tie_word_embeddings=True),
    "gemma2": lambda: build_dense_model("gemma2"),
    "CohereForCausalLM": lambda: tiny_models.build_model("CohereForCausalLM"),  # which transformers' modules compute
}


def store(name: str, path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """Save a tied model whose stored tensors are changed."""
    model = BUILDERS[name]()
    assert model.config.tie_word_embeddings
    saved = save_checkpoint(model, path)
    weights = load_file(path / "model.safetensors")
    assert EMBEDDING in weights
    assert HEAD not in weights
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return saved


def expected_tokens(path: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return output[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def tokens_of(path: str, **options: Any) -> list[int]:
    llm = LLM(path, **{"dtype": "float32", "num_blocks": 32, "skip_tokenizer_init": True} | options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    llm.engine.close()
    return output.outputs[0].token_ids


def add_head(weights: dict[str, torch.Tensor]) -> None:
    weights[HEAD] = weights[EMBEDDING].flip(0).contiguous()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_stored_head_that_differs_from_the_embedding_is_used(name: str, tmp_path: Path) -> None:
    path = store(name, tmp_path / "stored", add_head)
    tied = store(name, tmp_path / "tied", lambda weights: None)
    assert tokens_of(path) == expected_tokens(path) != expected_tokens(tied)


@pytest.mark.parametrize("name", BUILDERS)
def test_only_the_head_may_be_stored(name: str, tmp_path: Path) -> None:
    path = store(name, tmp_path, lambda weights: weights.update({HEAD: weights.pop(EMBEDDING)}))
    assert tokens_of(path) == expected_tokens(path)


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_only_the_head_may_be_stored_whatever_the_layers_prefix_is(prefix: str, tmp_path: Path) -> None:
    path = save_checkpoint(build_recurrent_model("nemotron-h", tie_word_embeddings=True), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (embedding,) = [name for name in weights if "embed" in name]
    own = embedding.partition(".")[0] + "."
    weights[HEAD] = weights[embedding].clone()
    answers = []
    for left_out in (HEAD, embedding):
        stored = {name.replace(own, prefix): weights[name] for name in weights if name != left_out}
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        answers.append(tokens_of(path))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_it_is_used_however_the_model_is_computed(options: dict[str, Any], tmp_path: Path) -> None:
    """The head of bfloat16 and of int8 is packed in other ways."""
    path = store("qwen3", tmp_path / "stored", add_head)
    untied = store("qwen3", tmp_path / "untied", add_head)
    config = tmp_path / "untied" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    assert tokens_of(path, **options) == tokens_of(untied, **options)


def test_a_copy_of_the_embedding_takes_no_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.models.decoder.loader.cpu_kernels_can_run", lambda *_: False)
    models = []
    for change in (lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}), add_head):
        llm = LLM(
            store("qwen3", tmp_path / str(len(models)), change), dtype="float32", num_blocks=8, skip_tokenizer_init=True
        )
        models.append(llm.engine.runner.workers.local.shard.model)  # type: ignore[attr-defined]
    assert all(isinstance(model, Decoder) for model in models)
    addresses = [model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr() for model in models]
    assert addresses == [True, False]
    assert caplog.text.count("differs from the embedding and is used") == 1


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma2"])
def test_names_of_the_model_without_its_head(name: str, with_head: bool, tmp_path: Path) -> None:
    """As ``AutoModel`` saves it: no name begins with ``model.``."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        if with_head:
            add_head(weights)
        for stored in [stored for stored in weights if stored.startswith("model.")]:
            weights[stored.removeprefix("model.")] = weights.pop(stored)

    path = store(name, tmp_path, change)
    assert tokens_of(path) == expected_tokens(path)

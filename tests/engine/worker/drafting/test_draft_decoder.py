"""Draft models that cannot draft for a model are refused, with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv.layer_cache import CacheDtype
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.model_config import ModelConfig
from engine.sampling_params import SamplingParams
from engine.worker.drafting.draft_decoder import DraftDecoder
from tests.engine.checkpoints import build_model, save_checkpoint
from tests.engine.conftest import SavedModel
from tests.engine.models.decoder.latent.latent_families import save_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import save_recurrent_model
from tests.engine.oracle import make_llm, run

DEMO_MODEL = Path(__file__).parents[4] / "demo" / "model"


def speculation(model: str | Path, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3} | options


def refusal(path: str, model: str | Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        make_llm(path, speculative_config=speculation(model), **options)
    return str(refused.value)


def test_another_vocabulary_is_refused_with_both_sizes(qwen3: SavedModel, tmp_path: Path) -> None:
    other = save_checkpoint(build_model("qwen3", vocab_size=512), tmp_path)
    message = refusal(qwen3.path, other)
    assert message.startswith(f"speculative_config.model='{other}' has a vocabulary of 512 tokens, and that of ")
    assert message.endswith(f"'{qwen3.path}' has 384; give a draft model with the same vocabulary")


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, other)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    assert '"router"' in text or '"Ġrouter"' in text
    (other / "tokenizer.json").write_text(text.replace('"Ġrouter"', '"Ġrooter"'), encoding="utf-8")
    message = refusal(str(DEMO_MODEL), other, skip_tokenizer_init=False)
    assert f"has another tokenizer than '{DEMO_MODEL}': token " in message
    assert "'Ġrooter' there, and 'Ġrouter' here" in message
    make_llm(str(DEMO_MODEL), speculative_config=speculation(other))  # token ids in, token ids out


def test_recurrent_layers_are_refused(qwen3: SavedModel, tmp_path: Path) -> None:
    model, path = save_recurrent_model("qwen3.5", tmp_path / "recurrent")
    target = save_checkpoint(build_model("qwen3", vocab_size=model.config.vocab_size), tmp_path / "target")
    assert "has recurrent layers" in refusal(target, path)


def refused_on_a_gpu(path: str, kv_cache_dtype: CacheDtype = "auto", **options: Any) -> str:
    """Return why a model cannot draft for itself on a GPU."""
    config = EngineConfig(
        model=path,
        speculative_config=speculation(path, **options),
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache_dtype,
    )
    assert config.speculation is not None
    target = ModelConfig.from_hf(load_hf_config(path))
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "max_model_len": 64, "block_size": 16}
    device = torch.device("cuda:0")
    with pytest.raises(ConfigError) as refused:
        DraftDecoder(config, config.speculation, target, device=device, kv_cache_dtype=kv_cache_dtype, **sizes)
    return str(refused.value)


def test_a_quantization_that_the_device_lacks_is_refused(qwen3: SavedModel) -> None:
    message = refused_on_a_gpu(qwen3.path, quantization="int8")
    assert "speculative_config.quantization='int8' runs on cpu, and the device is cuda:0; leave it out" in message


def test_latents_are_refused_beside_a_cache_in_fp8(tmp_path: Path) -> None:
    message = refused_on_a_gpu(save_latent_model("deepseek-v2", tmp_path)[1], kv_cache_dtype="fp8")
    assert "caches latents, and kv_cache_dtype=fp8 is for keys and values" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}, "model is missing; give"),
        ({"speculative_config": speculation("m", quantization="int3")}, "quantization='int3' is unknown"),
        ({"speculative_config": speculation("m", method="ngram")}, "model='m' is an option of method 'draft_model'"),
        (
            {"speculative_config": speculation("m"), "tensor_parallel_size": 2},
            "method='draft_model' needs tensor_parallel_size=1; choose ngram or suffix",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options("model", options)


def test_a_shorter_context_ends_the_drafts_and_not_the_answer(
    qwen3: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = save_checkpoint(build_model("qwen3", max_position_embeddings=24), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(30, 60))]
    expected = [output.outputs[0].token_ids for output in run(make_llm(qwen3.path), prompts, params)]
    llm = make_llm(qwen3.path, speculative_config=speculation(draft))
    drafter, longest = llm.engine.scheduler.drafter, 0
    assert drafter is not None
    add_drafts = drafter.add_drafts

    def watching(step: Any) -> None:
        nonlocal longest
        add_drafts(step)
        longest = max([longest, *(s.num_tokens + len(draft) for s, draft in step.output.drafts.items())])

    monkeypatch.setattr(drafter, "add_drafts", watching)
    assert [output.outputs[0].token_ids for output in run(llm, prompts, params)] == expected
    assert 20 < longest <= 24

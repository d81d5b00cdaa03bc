"""The tensors of a text part: named as a model of text has them, towers dropped by name, nothing else ignored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.sharding import Shard
from tests.engine.models.multimodal.conftest import Published
from tests.engine.models.multimodal.tiny_checkpoints import CASES
from tests.engine.oracle import make_llm

GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


def in_file(name: str) -> str:
    """Return the name of a tensor in a checkpoint of Qwen3-VL."""
    return f"model.language_model.{name.removeprefix('model.')}"


def damaged(published: Published, name: str, path: Path, extra: dict[str, torch.Tensor]) -> Path:
    """Return a copy of a checkpoint in one file, with further tensors."""
    saved = published(name)
    (path / "config.json").write_text((saved.path / "config.json").read_text())
    save_file(saved.weights | extra, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("name", CASES)
def test_only_the_text_part_is_left(published: Published, name: str) -> None:
    with open_checkpoint(published(name).path) as checkpoint:
        names = checkpoint.names
    norm = "model.embedding_norm." if name == "lfm2-vl" else "model.norm."
    assert {"model.embed_tokens.weight", f"{norm}weight"} < set(names)
    text = (
        "model.layers.",
        "model.embed_tokens",
        norm,
        "lm_head.",
        "model.per_layer_",
    )  # Gemma 4's also has _per_layer
    assert all(name.startswith(text) for name in names)


@pytest.mark.parametrize("name", ["gemma3", "ministral3"])
def test_a_tensor_that_no_list_names_is_refused(published: Published, name: str, tmp_path: Path) -> None:
    path = damaged(published, name, tmp_path, {"language_model.model.layers.0.extra.weight": torch.zeros(2)})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.extra\.weight"):
        make_llm(str(path), num_blocks=8)


def test_tensors_that_predict_several_tokens_are_dropped(published: Published, tmp_path: Path) -> None:
    path = damaged(published, "qwen3-vl", tmp_path, {"mtp.layers.0.weight": torch.zeros(2)})
    with open_checkpoint(path) as checkpoint:
        assert "mtp.layers.0.weight" not in checkpoint


def test_two_layouts_of_names_at_once_are_refused(published: Published, tmp_path: Path) -> None:
    path = damaged(published, "qwen3-vl", tmp_path, {"model.norm.weight": torch.zeros(2)})
    message = r"'model\..*norm\.weight' of '.*' and 'model\..*norm\.weight' of '.*' are both 'model\.norm\.weight' of"
    with pytest.raises(ModelLoadError, match=message), open_checkpoint(path):
        pass


def test_towers_in_a_checkpoint_of_text_are_refused(published: Published, tmp_path: Path) -> None:
    """What is dropped depends on the architecture, not on the names alone."""
    path = damaged(published, "qwen2-vl", tmp_path, {})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(raw | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_scaling": None})
    )
    with pytest.raises(ModelLoadError, match="tensors that a Qwen2ForCausalLM does not, 'visual"):
        make_llm(str(path), num_blocks=8)


# --- experts that are stored as [num_experts, inputs, outputs] ------------------------------------------------------


def test_experts_of_either_orientation_are_read_alike(published: Published, tmp_path: Path) -> None:
    saved = published("qwen3-vl-moe")
    own = {name: saved.model.get_parameter(in_file(name)).detach() for name in (GATE_UP, DOWN)}
    stored = {in_file(name): weight.contiguous() for name, weight in own.items()}
    turned = damaged(published, "qwen3-vl-moe", tmp_path, stored)
    for path in (saved.path, turned):
        with open_checkpoint(path) as checkpoint:
            for name, want in own.items():
                assert checkpoint.shape_of(name) == tuple(want.shape)
                assert torch.equal(checkpoint.read(name), want)
                out = torch.empty_like(want)
                checkpoint.read_into(out, name)
                assert torch.equal(out, want)


@pytest.mark.parametrize("shard", [Shard(0, 48, 24, 36, 4, 2), Shard(1, 64, 16, 48, 4, 3)], ids=["rows", "columns"])
@pytest.mark.parametrize("at_once", [1, 2**20], ids=["by one column", "whole"])
def test_a_rank_reads_its_part_of_experts_that_are_turned(
    published: Published, shard: Shard, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.checkpoint.plain_tensor._TRANSPOSED_BYTES", at_once)
    saved = published("qwen3-vl-moe")
    whole = saved.model.get_parameter(in_file(GATE_UP)).detach()[shard.index]
    want = whole.narrow(shard.dim, shard.start, shard.stop - shard.start).to(torch.bfloat16)
    with open_checkpoint(saved.path) as checkpoint:
        assert torch.equal(checkpoint.read(GATE_UP, shard).to(torch.bfloat16), want)
        out = torch.empty(want.shape, dtype=torch.bfloat16)
        checkpoint.read_into(out, GATE_UP, shard)
    assert torch.equal(out, want)


def test_square_experts_are_told_apart(published: Published, tmp_path: Path) -> None:
    """One of the two tensors may be square; the other one decides."""
    names = [in_file(name) for name in (GATE_UP, DOWN)]
    gate_up, down = torch.randn(4, 64, 64), torch.randn(4, 32, 64)  # 64 inputs, 32 features
    for is_turned in (True, False):
        stored = (gate_up, down) if is_turned else (gate_up.mT.contiguous(), down.mT.contiguous())
        path = tmp_path / str(is_turned)
        path.mkdir()
        with open_checkpoint(damaged(published, "qwen3-vl-moe", path, dict(zip(names, stored, strict=True)))) as read:
            assert torch.equal(read.read(GATE_UP), gate_up.mT)
            assert torch.equal(read.read(DOWN), down.mT)


def test_a_weight_that_is_not_finite_is_named(published: Published, tmp_path: Path) -> None:
    name = in_file(DOWN)
    weight = published("qwen3-vl-moe").weights[name].clone()
    weight[2, 1, 0] = float("nan")
    path = damaged(published, "qwen3-vl-moe", tmp_path, {name: weight})
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.mlp\.experts\.down_proj' of .* has 1 weights \(nan"):
        make_llm(str(path), num_blocks=8)


def test_shards_and_index_are_those_of_the_files(published: Published, tmp_path: Path) -> None:
    path = Path(shutil.copytree(published("gemma3").path, tmp_path / "copy"))
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    missing = index["language_model.model.norm.weight"]
    (path / missing).unlink()
    with pytest.raises(ModelLoadError, match=f"lacks the shards '{missing}'"), open_checkpoint(path):
        pass

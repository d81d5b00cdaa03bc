"""Models out of GGUF files answer as transformers' model with the values that the files' weights decode to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.checkpoint.formats import gguf as format_module
from engine.models.checkpoint.sharding import Shard
from engine.models.gguf.file import open_gguf
from engine.models.gguf.names import gguf_weights
from engine.models.gguf.weight import GgufWeight
from engine.sampling_params import SamplingParams
from kernels.dequant.gguf_types import GGUF_TYPES
from tests.engine.models.checkpoint.formats.quantised import check_codes
from tests.engine.models.gguf.conftest import Converted
from tests.engine.models.gguf.converted import ARCHITECTURES, build_model, write_gguf
from tests.engine.models.gguf.metadata import write_metadata
from tests.engine.models.gguf.recurrent import stored_values
from tests.engine.models.ties import require_no_ties
from tests.engine.oracle import answers, eos_ids, make_llm, random_tokens, run

MAX_TOKENS, PROMPT_TOKENS = 6, 20


# Weights and configs of all architectures are compared in `make test`, so answers can hardly differ.
_FURTHER = pytest.mark.exhaustive("answers of architectures that share everything with those that CI runs")
_SHARES = ("qwen35moe", "glm4v-moe", "granitehybrid", "falcon-h1", "nemotron_h")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_FURTHER) if name in _SHARES else name for name in ARCHITECTURES]
)
def test_answers_equal_transformers(converted: Converted, name: str) -> None:
    model, path = converted(name)
    prompts = [random_tokens(random.Random(seed), PROMPT_TOKENS, model.config.vocab_size) for seed in range(2)]
    ids = torch.tensor(prompts)
    with eos_ids(model, []):
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    require_no_ties(model, output[:, :-1], first=PROMPT_TOKENS - 1)
    llm = make_llm(str(path), num_blocks=64, block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers(run(llm, prompts, params)) == [[row] for row in output[:, PROMPT_TOKENS:].tolist()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_weight_is_the_decoded_one(converted: Converted, name: str) -> None:
    model, path = converted(name)
    expected = _by_stored_name(model)
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.names) == expected.keys()
        for weight_name, weight in expected.items():
            assert checkpoint.shape_of(weight_name) == weight.shape
            out = torch.full(weight.shape, torch.nan)
            checkpoint.read_into(out, weight_name)
            assert torch.equal(out, weight), weight_name
            assert torch.equal(checkpoint.read(weight_name).float(), weight), weight_name
            if weight.dim() == 2:
                check_codes(checkpoint, weight_name, weight)


def test_the_files_have_every_type(converted: Converted) -> None:
    files = [open_gguf(converted(name)[1]) for name in ARCHITECTURES]
    types = {tensor.type.name for file in files for tensor in file.tensors.values()}
    assert types == {kind.name for kind in GGUF_TYPES.values()}


CHANGES: dict[str, tuple[str, Callable[[GgufWeight], GgufWeight]]] = {
    "Llama's heads as transformers has them": ("llama", lambda weight: replace(weight, heads=0)),
    "as many keys as queries": ("llama", lambda weight: replace(weight, heads=min(weight.heads, 1))),
    "Gemma's norms without the 1": ("gemma3", lambda weight: replace(weight, has_one_added=False)),
    "GPT-OSS's ups before its gates": ("gpt-oss", lambda weight: replace(weight, parts=weight.parts[::-1])),
    "Qwen3.5's value heads as the file has them": ("qwen35", lambda weight: replace(weight, row_order=None)),
    "the inputs of Qwen3.5's output likewise": ("qwen35", lambda weight: replace(weight, column_order=None)),
    "the queries of GLM-4.1V as the file has them": ("glm4v", lambda weight: replace(weight, row_order=None)),
    "Qwen3-Next's alphas for its betas": (
        "qwen3next",
        lambda weight: weight if weight.row_order is None else replace(weight, row_order=weight.row_order[::-1]),
    ),
    "Qwen3.5's norms without the 1": ("qwen35moe", lambda weight: replace(weight, has_one_added=False)),
    "decays without their logarithm": ("mamba2", lambda weight: replace(weight, is_decay=False)),
    "Granite's ups before its gates": ("granitehybrid", lambda weight: replace(weight, parts=weight.parts[::-1])),
    "Gemma 4's norms less 1": ("gemma4-moe", lambda weight: replace(weight, has_one_added=True)),
    "Nemotron's heads as Llama has them": ("nemotron_h", lambda weight: replace(weight, heads=0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_planted_error_is_seen(converted: Converted, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = CHANGES[change]
    model, path = converted(name)
    monkeypatch.setattr(
        format_module, "gguf_weights", lambda file: {key: plant(weight) for key, weight in gguf_weights(file).items()}
    )
    with open_checkpoint(path) as checkpoint:
        expected = _by_stored_name(model)
        assert not all(torch.equal(checkpoint.read(key).float(), weight) for key, weight in expected.items())


@pytest.mark.parametrize(
    ("name", "weight", "shards"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", [Shard(0, 256, 128, 256), Shard(0, 256, 3, 200)]),
        ("llama", "model.layers.1.mlp.down_proj.weight", [Shard(1, 256, 128, 256), Shard(1, 256, 5, 9)]),
        ("llama-biases", "model.layers.0.self_attn.k_proj.bias", [Shard(0, 256, 64, 128)]),
        ("gemma2", "model.embed_tokens.weight", [Shard(0, 200, 67, 134)]),
        ("qwen35", "model.layers.0.linear_attn.conv1d.weight", [Shard(0, 512, 100, 300)]),
        ("qwen35", "model.layers.0.linear_attn.out_proj.weight", [Shard(1, 384, 192, 384)]),
        ("granitehybrid", "model.layers.0.shared_mlp.input_linear.weight", [Shard(0, 512, 200, 300)]),
    ],
)
def test_a_rank_reads_its_part(converted: Converted, name: str, weight: str, shards: list[Shard]) -> None:
    model, path = converted(name)
    whole = dict(model.named_parameters())[weight].detach()
    with open_checkpoint(path) as checkpoint:
        for shard in shards:
            expected = whole.narrow(shard.dim, shard.start, shard.stop - shard.start).bfloat16()
            out = torch.empty(expected.shape, dtype=torch.bfloat16)
            checkpoint.read_into(out, weight, shard)
            assert torch.equal(out, expected)


def _with_an_unknown_tensor(writer: Any) -> None:
    writer.add_tensor("blk.0.attn_extra.weight", torch.zeros(4).numpy())


def _with_fewer_heads(writer: Any) -> None:
    writer.kv_data[0]["qwen3.attention.head_count"].value = 2


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "an unknown tensor": (
        _with_an_unknown_tensor,
        r"tensors that a Qwen3ForCausalLM does not, 'blk\.0\.attn_extra\.weight' for one; its metadata does not "
        "describe it: download the file again",
    ),
    "other sizes": (_with_fewer_heads, "has shape .* but its metadata says .*; download the file again"),
    "more layers": (
        lambda writer: setattr(writer.kv_data[0]["qwen3.block_count"], "value", 3),
        r"lacks the tensor 'model.layers.2.*', which its metadata asks for; download the file again",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_the_metadata_are_refused(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    write_gguf(build_model("qwen3"), "qwen3", path := tmp_path / "a.gguf", add_tokenizer=change)
    with pytest.raises(ModelLoadError, match=message):
        make_llm(str(path), num_blocks=64)


@pytest.mark.parametrize("name", ["qwen35", "glm4moe", "deepseek2-v3"])
def test_layers_that_predict_further_tokens_are_not_read(name: str, tmp_path: Path) -> None:
    architecture, _, _ = ARCHITECTURES[name]

    def with_another_layer(writer: Any) -> None:
        writer.kv_data[0][f"{architecture}.block_count"].value = 3  # llama.cpp counts them, too
        writer.add_nextn_predict_layers(1)
        for module in ("attn_norm", "nextn.eh_proj", "nextn.shared_head_norm", "ffn_gate_exps"):
            writer.add_tensor(f"blk.2.{module}.weight", torch.zeros(32).numpy())

    write_gguf(build_model(name), name, path := tmp_path / "a.gguf", add_tokenizer=with_another_layer)
    model = make_llm(str(path), num_blocks=16).engine.runner.workers.local.shard.model
    assert len(model._backbone.layers if name == "glm4moe" else model.layers) == 2


def test_latent_keys_and_values_in_one_weight(tmp_path: Path) -> None:
    """As in files of before April 2025, whose keys and values were not absorbed."""
    write_gguf(build_model("deepseek2-v3"), "deepseek2-v3", path := tmp_path / "a.gguf")
    with open_checkpoint(path) as checkpoint:
        whole = [checkpoint.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight") for layer in range(2)]
    halved = open_gguf(path)
    kept = {
        name: tensor for name, tensor in halved.tensors.items() if not name.endswith(("_k_b.weight", "_v_b.weight"))
    }

    def with_whole(writer: Any) -> None:
        for layer, weight in enumerate(whole):
            writer.add_tensor(f"blk.{layer}.attn_kv_b.weight", weight.numpy())

    write_metadata(older := tmp_path / "b.gguf", "deepseek2", add=with_whole)
    joined = halved._replace(tensors=kept | open_gguf(older).tensors)
    weights = gguf_weights(joined)
    assert weights["model.layers.1.self_attn.kv_b_proj.weight"].shape == whole[1].shape
    with open_checkpoint(older) as checkpoint:
        assert torch.equal(checkpoint.read("model.layers.1.self_attn.kv_b_proj.weight"), whole[1])


def test_keys_of_layers_that_read_those_of_others_are_not_read(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 E2B and E4B have them, and so have the files that are made of these."""

    def with_keys(writer: Any) -> None:
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            writer.add_tensor(f"blk.3.{name}.weight", torch.full((3,), 7.0).numpy())

    write_gguf(build_model("gemma4-e4b"), "gemma4-e4b", path := tmp_path / "a.gguf", add_tokenizer=with_keys)
    make_llm(str(path), num_blocks=16)


def test_gates_and_ups_of_experts_may_be_in_one_stack(tmp_path: Path) -> None:
    gates, ups = torch.randn(3, 8, 256), torch.randn(3, 8, 256)
    stored = torch.cat([gates, ups], dim=1).half().numpy()
    write_metadata(
        path := tmp_path / "a.gguf",
        "qwen3moe",
        add=lambda writer: writer.add_tensor("blk.0.ffn_gate_up_exps.weight", stored),
    )
    with open_checkpoint(path) as checkpoint:
        for expert in range(3):
            for name, values in (("gate_proj", gates), ("up_proj", ups)):
                read = checkpoint.read(f"model.layers.0.mlp.experts.{expert}.{name}.weight")
                assert torch.equal(read, values[expert].half())


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    write_gguf(build_model("qwen3"), "qwen3", path := tmp_path / "a.gguf")
    tensors = open_gguf(path).tensors
    name = next(name for name, tensor in tensors.items() if tensor.type.block_elements > 1 and "ffn_" in name)
    data = bytearray(path.read_bytes())
    kind, start = tensors[name].type, tensors[name].start
    data[start : start + kind.block_bytes] = b"\xff" * kind.block_bytes  # a float16 of these bits is not a number
    path.write_bytes(data)
    message = rf"'model\.layers\.\d\.mlp\..*' of '{path}' has {kind.block_elements} weights .* not finite; download"
    with pytest.raises(ModelLoadError, match=message):
        make_llm(str(path), num_blocks=64)


PUBLISHED = {  # parts of names that transformers changes when it loads
    "nemotron_h": {"model.": "backbone."},
    "granitemoehybrid": {
        "block_sparse_moe.router": "block_sparse_moe.router.layer",
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    },
}


def _by_stored_name(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters with the names of published checkpoints: experts that are not stacked."""
    weights: dict[str, torch.Tensor] = {}
    kind = model.config.model_type
    for name, values in stored_values(model):
        parent = "" if kind == "gemma4_text" else ".mlp"
        block, _, matrix = name.partition(f"{parent}.experts.")
        for found, published in PUBLISHED.get(kind, {}).items():
            name = name.replace(found, published)
        if kind == "nemotron_h" and ".experts." in name:
            weights |= {f"{name.replace('.experts.', f'.experts.{i}.')}.weight": each for i, each in enumerate(values)}
            continue
        if not matrix or kind == "gpt_oss":
            mixtral = kind == "mixtral" and ".mlp.gate." in name
            weights[name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name] = values
            continue
        for expert, weight in enumerate(values):
            halves = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            for part, value in halves if matrix == "gate_up_proj" else [(matrix, weight)]:
                if kind == "mixtral":
                    part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
                    weights[f"{block}.block_sparse_moe.experts.{expert}.{part}.weight"] = value
                else:
                    weights[f"{block}{parent}.experts.{expert}.{part}.weight"] = value
    return weights


def test_qwen3_next_is_qwen3_5_with_other_names() -> None:
    """So its files are read as those of Qwen3.5 with experts."""
    other = build_model("qwen3next")
    fields = {name: value for name, value in other.config.to_dict().items() if name not in ("model_type", "dtype")}
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **fields | {"norm_topk_prob": True}))
    original = original.float().eval()
    keys, key_dim = other.config.linear_num_key_heads, other.config.linear_key_head_dim
    values = other.config.linear_num_value_heads // keys * other.config.linear_value_head_dim
    weights = {}
    for name, weight in original.state_dict().items():
        rows = weight.view(keys, -1, weight.shape[-1]) if weight.dim() == 2 and not weight.shape[0] % keys else weight
        if name.endswith("in_proj_qkvz.weight"):
            *qkv, z = (part.flatten(0, 1) for part in rows.split([key_dim, key_dim, values, values], dim=1))
            weights |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
        elif name.endswith("in_proj_ba.weight"):
            b, a = (part.flatten(0, 1) for part in rows.chunk(2, dim=1))
            weights |= {name.replace("ba.weight", "b.weight"): b, name.replace("ba.weight", "a.weight"): a}
        else:
            weights[name] = weight
    other.load_state_dict(weights)
    ids = torch.tensor([random_tokens(random.Random(0), PROMPT_TOKENS, other.config.vocab_size)])
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, original(ids).logits)

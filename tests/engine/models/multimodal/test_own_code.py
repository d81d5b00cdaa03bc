"""Checkpoints whose code is their own: the text part gives the tokens of transformers' class of that part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.models.checkpoint.checkpoint import open_checkpoint
from engine.models.config.files.config_json import read_config_json
from engine.models.config.files.hf_config import load_hf_config
from engine.models.config.files.own_code import OWN_CODE
from engine.sampling_params import SamplingParams
from tests.engine.checkpoints import save_checkpoint
from tests.engine.models.adapter import tiny_models
from tests.engine.models.adapter.greedy_answers import MAX_TOKENS, check, make_prompts, oracle
from tests.engine.models.checkpoint.formats.quantised import is_linear
from tests.engine.models.checkpoint.formats.test_fp8 import compressed, fp8_channel
from tests.engine.models.decoder.latent.latent_families import build_latent_model
from tests.engine.models.decoder.recurrent.recurrent_families import build_recurrent_model
from tests.engine.oracle import answers, make_llm, oracle_beams, run
from tests.engine.worker.test_tensor_parallel import ThreadRanks

FILE = "model.safetensors"
AUTO_MAP = {"auto_map": {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}}


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    Attributes:
        architecture, model_type: of the whole.
        part: the architecture of the text part.
        field: of config.json that has the text part's config; None: the fields are at the top.
        others: further fields.
        prefix: before the names of the text part's weights.
        renamed: what replaces a part of their names.
        towers: names of further tensors.
    """

    architecture: str
    model_type: str
    part: str
    field: str | None
    towers: tuple[str, ...]
    prefix: str = ""
    others: dict[str, Any] = field(default_factory=dict)
    renamed: tuple[str, str] = ("", "")

    def build(self) -> PreTrainedModel:
        """Return a tiny model of the text part."""
        if self.part in OTHERS:
            return OTHERS[self.part]()
        return tiny_models.build_model(self.part, num_hidden_layers=2, vocab_size=120, tie_word_embeddings=False)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The values of model_impl that serve it."""
        return ("auto",) if self.part in OTHERS else ("auto", "transformers")


# Only our own decoder computes these.
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "DeepseekV3ForCausalLM": lambda: build_latent_model("deepseek-v3", vocab_size=120),
    "NemotronHForCausalLM": lambda: build_recurrent_model("nemotron-h", vocab_size=120),
}
QWEN2, QWEN3, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
INTERN = ("vision_model.encoder.layers.0.attn.qkv.weight", "mlp1.1.weight")
MINICPM = ("vpm.encoder.layers.0.mlp.fc1.weight", "resampler.kv_proj.weight")
OMNI = ("apm.layers.0.fc1.weight", "audio_projection_layer.linear1.weight", "tts.emb_text.weight")
OVIS = ("visual_tokenizer.vit.encoder.layers.0.mlp.fc1.weight", "vte.weight")
PUBLISHED: dict[str, Published] = {
    "InternVL3-8B, InternVL3-78B of OpenGVLab": Published(
        "InternVLChatModel", "internvl_chat", QWEN2, "llm_config", INTERN, "language_model."
    ),
    "InternVL3_5-8B": Published("InternVLChatModel", "internvl_chat", QWEN3, "llm_config", INTERN, "language_model."),
    "InternVL3_5-30B-A3B": Published(
        "InternVLChatModel",
        "internvl_chat",
        QWEN3_MOE,
        "llm_config",
        INTERN,
        "language_model.",
    ),
    "InternVL3_5-GPT-OSS-20B-A4B-Preview": Published(
        "InternVLChatModel",
        "internvl_chat",
        "GptOssForCausalLM",
        "llm_config",
        INTERN,
        "language_model.",
    ),
    "Skywork-R1V3-38B": Published(
        "SkyworkR1VChatModel", "skywork_chat", QWEN2, "llm_config", INTERN, "language_model."
    ),
    "Llama-3.1-Nemotron-Nano-VL-8B-V1": Published(
        "Llama_Nemotron_Nano_VL", "Llama_Nemotron_Nano_VL", "LlamaForCausalLM", "llm_config", INTERN, "language_model."
    ),
    "Eagle2.5-8B": Published(
        "Eagle2_5_VLForConditionalGeneration", "eagle_2_5_vl", QWEN2, "text_config", INTERN, "language_model."
    ),
    "NVIDIA-Nemotron-Nano-12B-v2-VL-BF16": Published(
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_VL_V2",
        "NemotronHForCausalLM",
        "llm_config",
        ("vision_model.radio_model.model.blocks.0.attn.qkv.weight", "mlp1.0.weight"),
        "language_model.",
    ),
    "Intern-S1-mini": Published(
        "InternS1ForConditionalGeneration",
        "interns1",
        QWEN3,
        "text_config",
        ("model.vision_tower.encoder.layer.0.mlp.fc1.weight", "model.multi_modal_projector.linear_1.weight"),
        renamed=("model.", "model.language_model."),
    ),
    "Kimi-VL-A3B-Instruct, Kimi-VL-A3B-Thinking-2506": Published(
        "KimiVLForConditionalGeneration",
        "kimi_vl",
        "DeepseekV3ForCausalLM",
        "text_config",
        ("vision_tower.encoder.blocks.0.wqkv.weight", "multi_modal_projector.linear_1.weight"),
        "language_model.",
    ),
    "MiniCPM-V-2_6": Published("MiniCPMV", "minicpmv", QWEN2, None, MINICPM, "llm.", {"version": 2.6}),
    "MiniCPM-V-4_5": Published("MiniCPMV", "minicpmv", QWEN3, None, MINICPM, "llm.", {"version": 4.5}),
    "MiniCPM-o-2_6": Published("MiniCPMO", "minicpmo", QWEN2, None, MINICPM + OMNI, "llm.", {"version": "2.6"}),
    "Ovis2-8B": Published("Ovis", "ovis", QWEN2, "llm_config", OVIS, "llm."),
    "Ovis2.5-9B": Published("Ovis2_5", "ovis2_5", QWEN3, "llm_config", OVIS, "llm."),
    "dots.ocr": Published("DotsOCRForCausalLM", "dots_ocr", QWEN2, None, ("vision_tower.blocks.0.mlp.fc1.weight",)),
    "MiMo-7B-Base, MiMo-7B-RL": Published(
        "MiMoForCausalLM",
        "mimo",
        QWEN2,
        None,
        ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"),
        others={"num_nextn_predict_layers": 1, "use_mrope": False},
    ),
    "Phi-3.5-vision-instruct": Published(
        "Phi3VForCausalLM", "phi3_v", "Phi3ForCausalLM", None, ("model.vision_embed_tokens.img_projection.0.weight",)
    ),
    "Phi-4-multimodal-instruct": Published(
        "Phi4MMForCausalLM",
        "phi4mm",
        "Phi3ForCausalLM",
        None,
        (
            "model.embed_tokens_extend.image_embed.img_projection.0.weight",
            "model.layers.0.self_attn.qkv_proj.lora_A.vision.weight",
            "model.layers.0.self_attn.qkv_proj.lora_B.speech.weight",
        ),
        renamed=("_proj.weight", "_proj.base_layer.weight"),
        others={"embd_layer": {"embedding_cls": "image_audio"}, "vision_lora": {"r": 256}},
    ),
}
FEW = ("InternVL3-8B, InternVL3-78B of OpenGVLab", "MiniCPM-V-4_5", "Phi-4-multimodal-instruct")
LONG_OR_EXHAUSTIVE = [
    pytest.param(name, marks=pytest.mark.long if name in FEW else pytest.mark.exhaustive("names of further kinds"))
    for name in PUBLISHED
]
CASES = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in PUBLISHED]


def save(name: str, path: Path, *, is_quantised: bool = False) -> PreTrainedModel:
    """Write a checkpoint; return transformers' model of its text part, dequantised if it is quantised."""
    kind, model = PUBLISHED[name], PUBLISHED[name].build()
    save_checkpoint(model, path / "text")
    weights: dict[str, torch.Tensor] = {}
    for own, tensor in load_file(path / "text" / FILE).items():
        old, new = kind.renamed
        stored = kind.prefix + (own.replace(old, new, 1) if old else own)
        if is_quantised and is_linear(own):
            encoded = fp8_channel(own.removesuffix(".weight"), tensor)
            with torch.no_grad():
                model.get_parameter(own).copy_(encoded.values)
            weights |= {stored.removesuffix("weight") + end: part for end, part in encoded.tensors.items()}
        else:
            weights[stored] = tensor
    weights |= {tower: torch.zeros(2) for tower in kind.towers}
    (path / "whole").mkdir()
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, path / "whole" / FILE, {"format": "pt"})
    text = json.loads((path / "text" / "config.json").read_text(), object_hook=_with_infinity)
    fields = AUTO_MAP | {"torch_dtype": "float32"} | (text if kind.field is None else {kind.field: text}) | kind.others
    fields |= {"architectures": [kind.architecture], "model_type": kind.model_type}
    if is_quantised:
        fields |= compressed(strategy="channel")
    (path / "whole" / "config.json").write_text(json.dumps(fields))
    return model.eval()


def _with_infinity(fields: dict[str, Any]) -> Any:
    """Return what published files have for the way in which transformers writes an infinity."""
    return float(fields["__float__"]) if "__float__" in fields else fields


def test_every_row_is_compared() -> None:
    assert {kind.architecture for kind in PUBLISHED.values()} == OWN_CODE.keys()


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_the_text_part(name: str, tmp_path: Path) -> None:
    expected = oracle(save(name, tmp_path), make_prompts())
    assert len({tuple(answer) for (answer,) in expected}) > 1, "the oracle's answers are too much alike"
    for model_impl in PUBLISHED[name].implementations:
        check(str(tmp_path / "whole"), (4, 7, True, 0.0), expected, model_impl=model_impl)


@pytest.mark.parametrize("name", LONG_OR_EXHAUSTIVE)
def test_beams_and_two_ranks_equal_those_of_the_text_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = save(name, tmp_path), make_prompts()
    params = SamplingParams(beam_width=3, n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm = make_llm(str(tmp_path / "whole"), block_size=4, max_num_batched_tokens=16)
    beams = [oracle_beams(model, prompt, params, [])[0] for prompt in prompts[:2]]
    assert answers(run(llm, prompts[:2], params)) == beams
    monkeypatch.setattr("engine.worker.worker_pool.RemoteRanks", ThreadRanks)
    shared = make_llm(str(tmp_path / "whole"), tensor_parallel_size=2, num_blocks=32)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers(run(shared, prompts, greedy)) == oracle(model, prompts)
    shared.engine.close()


def test_quantised_weights_have_their_published_names(tmp_path: Path) -> None:
    expected = oracle(save(FEW[0], tmp_path, is_quantised=True), make_prompts())
    check(str(tmp_path / "whole"), (4, 7, True, 0.0), expected, model_impl="auto")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["InternVLChatModel"], "llm_config": {"model_type": "internlm2"}},
            r"'InternVLChatModel' is not supported with llm_config.model_type='internlm2': no test has .*; supported: "
            r"qwen2, .*; docs/models.md lists what is served",
        ),
        (
            {"architectures": ["InternVLChatModel"], "llm_config": []},
            "of 'InternVLChatModel' has no llm_config and no text_config, which describes its text part; download",
        ),
        (
            {"architectures": ["InternVLChatModel"], "llm_config": {"model_type": ["qwen2"]}},
            r"model_type=\['qwen2'\]: no test",
        ),
        (
            {"architectures": ["MiniCPMV"], "version": 2.5},
            "'MiniCPMV' is not supported with version=2.5: no test has .*; supported: 2.6, 4.5;",
        ),
    ],
)
def test_another_text_part_is_refused_by_its_type(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AUTO_MAP | fields))
    for read in (read_config_json, load_hf_config):
        with pytest.raises(ModelLoadError, match=message):
            read(tmp_path)


def test_weights_of_no_tower_are_refused(tmp_path: Path) -> None:
    save(FEW[0], tmp_path)
    file = tmp_path / "whole" / FILE
    save_file(load_file(file) | {"projector9.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"projector9\.weight"):
        check(str(tmp_path / "whole"), (4, 7, True, 0.0), [], model_impl="auto")


def test_two_weights_of_one_name_are_refused(tmp_path: Path) -> None:
    save(FEW[0], tmp_path)
    file = tmp_path / "whole" / FILE
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(2)}, file, {"format": "pt"})
    with (
        pytest.raises(ModelLoadError, match=r"are both 'lm_head\.weight' of the text part"),
        open_checkpoint(tmp_path / "whole"),
    ):
        pass

"""docs/models.md: which architectures are served, by what, and how that was tested; and why others are refused.

python -m tests.engine.models.adapter.models_page     writes the page
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.config.families.architectures import TENSOR_PARALLEL, WITH_SINKS
from engine.models.config.families.refused import CONDITIONAL, NOT_TEXT_ONLY, REFUSED, REFUSED_TEXT_PARTS
from engine.models.config.families.table import ARCHITECTURES
from engine.models.config.files.text_parts import TEXT_ARCHITECTURES
from engine.text.gguf_words import WORDS
from kernels.dequant.gguf_types import GGUF_TYPES
from tests.engine.checkpoints import EXPERT_FAMILIES, FAMILIES
from tests.engine.models.adapter.checkpoints_by_name import by_name
from tests.engine.models.adapter.greedy_answers import SETTINGS
from tests.engine.models.adapter.test_answers import FEW, IN_EVERY_SETTING, KINDS
from tests.engine.models.adapter.test_logits import WINDOWS
from tests.engine.models.adapter.tiny_models import TINY_MODELS, WINDOW, TinyModel
from tests.engine.models.decoder.dense_families import DENSE_FAMILIES
from tests.engine.models.decoder.experts.test_logits import WINDOWED
from tests.engine.models.decoder.gemma.gemma_families import GEMMA_FAMILIES
from tests.engine.models.decoder.latent.latent_families import LATENT_FAMILIES, latent_architecture
from tests.engine.models.decoder.llama4.llama4_models import LLAMA4_MODELS
from tests.engine.models.decoder.recurrent.recurrent_families import RECURRENT_FAMILIES, recurrent_architecture
from tests.engine.models.gguf.converted import ARCHITECTURES as GGUF_MODELS
from tests.engine.models.multimodal.test_own_code import PUBLISHED as OWN_CODE
from tests.engine.models.multimodal.tiny_checkpoints import COMPARED_APART, TINY
from tests.engine.models.published.text_pairs import TEXT_PAIRS
from tests.engine.worker.test_tensor_parallel import SHARED_BY_RANKS

PAGE = Path(__file__).parents[4] / "docs" / "models.md"

HEAD = """# Models

Pagoda serves decoder-only language models, from a Hugging Face checkpoint with safetensors or from a
[GGUF file](#gguf-files). The name in `architectures` of config.json decides: our own decoder computes {num_own}
architectures, fused and on CPUs in C, and the modules of transformers compute {num_proven}, through our paged
attention. Where both can, our own decoder does, unless it lacks the model's activation or RoPE, or `engine.model_impl`
says otherwise. An architecture that is not on this page is refused when the engine starts.

Of [multimodal checkpoints](#multimodal-checkpoints) the text part is served. Weights may be in bfloat16, float16,
float32, or in one of the [formats](#weight-formats) FP8, NVFP4, MXFP4, int4, AWQ, GPTQ, bitsandbytes and MLX.

This page is written by `python -m tests.engine.models.adapter.models_page`, and a test compares it with the code.

## Checkpoints by name

Names that people search for; other checkpoints of the same architecture are served alike. Their weights may be in any
of the [formats](#weight-formats) that safetensors files have (`-FP8`, `-NVFP4`, `-AWQ`, `-GPTQ-Int4`, `-bnb-4bit`,
`-MLX-4bit` and others); the third column says where [GGUF files](#gguf-files) are read too. The names are examples: no
checkpoint of real size was loaded, only tiny ones with the same fields, names and formats.

| checkpoints | computed as | files | tensor parallelism |
| --- | --- | --- | --- |
{by_name}

## Our own decoder

The tiny models below are compared with transformers' `generate` in `tests/engine/models/`, and so are tensor-parallel
ranks, int8 and every setting of the engine. On a CPU all of them run in the C kernels, soft-caps included. On several
tensor-parallel ranks transformers' modules compute OLMo 2 and 3, whose norms of queries and keys are over all heads;
OLMo Hybrid, whose norms are alike, is refused there. Of experts only those that a token is routed to are computed, in C
on a CPU and in Triton on a GPU; int8 experts need the C kernels.

Of models with latent attention (MLA) the cache keeps one vector for each token, not the keys and values of every head.
On CPUs attention multiplies queries with these vectors ("absorbed") in prompts and answers alike, so that a token's
bits do not depend on how its prompt was cut. On GPUs a step that computes many tokens of a sequence, from 171 with
DeepSeek's sizes, expands the vectors of its context to keys and values, of some heads at a time in 256 MiB: a pair of
tokens then costs a head 320 products in place of 1,088. Steps that CUDA graphs replay stay absorbed, and so do contexts
with more tokens than an indexer chooses, or of which so few heads fit that most of a GPU would be idle. Logits, tokens,
beams, swapped requests and ranks are compared as above (`tests/engine/models/decoder/latent/`). Ranks divide the heads;
each keeps the vectors of all tokens. These models, Kimi Linear among them, run on CPUs in C, and on GPUs with our
Triton attention kernels: flash-attn does not compute heads of this size, and `batch_invariant` is refused there. An
H200 ran attention to the vectors; expanded ones ran in Triton's interpreter only.

Of models with sparse latent attention (DSA: DeepSeek V3.2, GLM-5) a layer's indexer scores the tokens of the context,
and attention reads the `index_topk` best ones; of equal scores those of earlier tokens. The indexer's keys are one more
vector for each token in the blocks of the cache; in GLM-5.2 only the layers that `indexer_types` calls full have one,
and the others read what the last such layer chose. The choice is computed in float32, as transformers computes it, and
each rank has the whole indexer. The Hadamard rotation and the FP8 of published kernels, which round scores, are not
computed. On CPUs these models run in C, too, the indexer with weights of the checkpoint's dtype whatever `quantization`
says; while a context has at most `index_topk` tokens nothing is scored. On a GPU scores, choice and attention are
Triton kernels, also of contexts whose tokens all count, unless these are expanded. They are tested in Triton's
interpreter and compiled for GPUs; an H200 ran them by themselves.

Of models with recurrent layers the logits of every token are compared with those of transformers, within 1e-5 of the
largest, in packed steps of chunks and decodes, and tokens and beams with those of `generate`, with preempted requests
and prompts that resume at snapshots (`tests/engine/models/decoder/recurrent/`). Their states are float32. Ranks share
a model whose heads of every kind and groups of heads they divide. Layers that predict further tokens (`mtp.*`) are
loaded only to [draft](performance.md#speculative-decoding).

Layers of Gemma 4 differ in the size and number of their heads, and the last ones of E2B and E4B read the keys and
values of earlier ones, as those of Gemma 3n do. Gemma 3n has several residual streams (AltUp), a low-rank branch beside
attention (LAuReL), and feed-forwards that drop small gates by the mean and deviation of all, so that ranks do not share
it; `batch_invariant` is refused for it on GPUs. Logits, tokens and beams of both are compared likewise
(`tests/engine/models/decoder/gemma/`).

On a GPU the recurrences of prompts in bfloat16 and float16 are computed in chunks of 64 tokens (Kimi Linear: 32), as in
their papers, with products on tensor cores and the state rounded to that dtype. At most 16 tokens of a sequence in a
step, such as decodes and drafts, are computed one by one with the state in float32; so are prompts in float32 and with
`engine.batch_invariant`, which takes several times as long. A prompt in chunks has the same bits whatever else the step
computes. They may differ if it is split into other steps, resumes at a snapshot, or saves other snapshots on the way.

Layers of Llama 4 attend to their own chunk of the context, and every fourth, without positions, to all of it. Pages of
a chunk are freed when the next one begins, and a cached prompt is hit without those of earlier chunks. Contexts of
several chunks are compared likewise (`tests/engine/models/decoder/llama4/`). On a GPU the Triton kernels compute
chunks, and flash-attn does not.

| architecture | tiny models compared | attention and feed-forward | ranks compared |
| --- | --- | --- | --- |
{own}

## transformers' modules

Continuous batching, chunked prefill, prefix caching, preemption, swapping, beams and failover are those of our own
decoder. int8 is refused, and steps are slower. Weights are read into the host's memory before they are copied to a GPU.

Tensor-parallel ranks divide a model by the plan of its config (`base_model_tp_plan`), where it has one: heads,
feed-forwards and experts, or the experts alone. Each rank has the whole embedding and head, and reads the files whole,
one tensor at a time. The last column says which architectures were compared on two ranks with one; others are refused.

What was compared, with tiny random models in float32 on a CPU (`tests/engine/models/adapter/`):

- logits of every token, in packed steps of chunks and decodes, with those of transformers: within 1e-5 of the largest.
  With windows, contexts are more than twice as long;
- greedy tokens with those of `generate`, with blocks of 4 tokens, steps of 7 tokens, preempted requests, shared
  prefixes and a cached prompt, and for a few in {num_settings} settings; beams with those of `generate`. The table
  says which command runs what of it;
- no expert and no token in these comparisons is nearly another one, so that rounding chooses none;
- for a few, logits in bfloat16 and float16: as near to float32 as those of transformers are;
- planted errors make the comparison fail: a window that is ignored, one too long or one too short, a scale, a soft-cap,
  sinks or the scaling of logits left out, positions off by one after a chunk's border.

Checkpoints of real size were not compared. On a GPU our Triton kernels compute sinks, and they or flash-attn
soft-caps. MiMo V2 Flash, whose values are smaller than its keys, runs on a CPU only.

| architecture | computed by default by | attention and feed-forward | tokens compared in | beams in | ranks |
| --- | --- | --- | --- | --- | --- |
"""

MULTIMODAL_HEAD = """
## Multimodal checkpoints

The decoder of text in these checkpoints is loaded, and the towers for images and sound are not. Requests with images,
sound or video get 400. Image tokens that a message spells out stay text. Of config.json, the text part's fields are
read as transformers reads them; end tokens, dtype and tied embeddings may be given for the whole model.

What was compared, with tiny checkpoints that have the fields, names and shards of the published ones
(`tests/engine/models/multimodal/`): greedy tokens with those of transformers' multimodal class, with chunked prompts,
preempted requests and cached prompts, of our own decoder and of transformers' modules; for some, every setting, beams
and two tensor-parallel ranks. Where transformers has no multimodal class of the architecture (the last rows), its class
of the text part is compared, and code that comes with the checkpoint is not run.

| checkpoints such as | architecture | text part | computed by default by |
| --- | --- | --- | --- |
"""

REFUSALS = """
## Weight formats

Weights are stored in bfloat16, float16 or float32, or in one of the formats below. [Quantised models](quantization.md)
says which are computed as they are stored, and which are dequantised while they are read. Which weights are quantised
is seen from the tensors, so any layers may be left out. The checkpoint's quantisation of the KV cache is not computed.

| format | as written by |
| --- | --- |
| FP8 in blocks, for each output or for the tensor; MXFP8 | DeepSeek, Qwen, Mistral, compressed-tensors, ModelOpt |
| NVFP4, also mixed with FP8, and with factors of inputs (NVFP4_AWQ) | ModelOpt, compressed-tensors |
| MXFP4 | GPT-OSS, compressed-tensors, Quark |
| integers of 4 or 8 bits in groups, with or without zero points and actorder | compressed-tensors |
| integers of 4 bits in groups (INT4_AWQ, W4A8_AWQ) | ModelOpt |
| GPTQ of 2, 3, 4 or 8 bits, versions 1 and 2, with or without desc_act | GPTQModel, AutoGPTQ, AutoRound |
| AWQ (gemm) | AutoAWQ, AutoRound |
| NF4, FP4, also with double quantisation; 8-bit | bitsandbytes |
| integers of 2 to 8 bits with scales and biases ("affine"), MXFP4, NVFP4, MXFP8, embeddings too | MLX |

Some programs also divide weights otherwise: MLX stacks experts, splits those of latent attention, turns convolutions
and adds one to norms; ModelOpt stacks the experts of some models, with one scale for all or several for each; Unsloth
and llm-compressor have GPT-OSS's experts one by one. These layouts are read too.

Each format is compared with an independent reference, bit for bit in float32, and the tokens of a tiny checkpoint with
those of transformers for the dequantised weights (`tests/engine/models/checkpoint/formats/`). So are {num_pairs} pairs
of a family and a format, each with a tiny checkpoint that is written as a published one is
(`tests/engine/models/published/`).

## GGUF files

`model` may be a GGUF file, or the first part of a split one. Nothing else is needed: config, tokenizer, chat template,
stop tokens and sampling defaults come from its metadata. A model that is not quantised keeps its dtype; the
activations of others, and of Gemma in float16, are bfloat16. Like llama.cpp,
Pagoda also ends answers at control tokens that are known by their texts, such as `<end_of_turn>`.

| llama.cpp's architecture | architecture |
| --- | --- |
{gguf}

| part | what is read |
| --- | --- |
| types of tensors | {gguf_types} |
| `tokenizer.ggml.model` | `llama`, `gemma4` (SentencePiece's BPE), `gpt2` (byte-level BPE) |
| `tokenizer.ggml.pre` of byte-level BPE | {gguf_words} |

Compared are each type of blocks with the package `gguf`, bit by bit; the tokens of a tiny model of each architecture,
written as llama.cpp's converter does, with those of transformers for the decoded weights; and tokenizers on 2,000 texts
each with the ones that they were converted from (`tests/engine/models/gguf/`, `tests/engine/text/`). Files of real size
were not compared. Not in a file's metadata, and so taken as in the published models: which layers of Gemma 2, Gemma 3
and GPT-OSS slide, the scale of attention in the largest Gemma 2 and 3, the limits of GPT-OSS's activation and of
Nemotron-H's steps, the order of Falcon-H1's gate and norm, and the groups of DeepSeek's experts in older files.
Qwen3-Next's files are read as those of Qwen3.5 with experts, which computes the same. Files of Mamba 2, Granite 4 H and
Nemotron-H give a context of 1M tokens: set `max_model_len`. Granite 4 without recurrent layers is another architecture
of llama.cpp's, which is not read.

## Refused

| why | architectures |
| --- | --- |
{rows}

Refused for any architecture:

- pickled weights, and weights in other formats than those above;
- code of the checkpoint's own (`auto_map`): it is never run. Where the architecture is one of those above, as that of
  Microsoft's Phi-3 and Phi-4 is, it is ignored;
- weights that do not fit the config.json: nothing that is missing is made up;
- LongRoPE beyond its original context: there transformers chooses the factors by the longest request of a batch, so
  one request would change the others. The original context is the default, and more is refused;
- with transformers' modules: layers that differ in their heads, and a mask that is neither causal nor a sliding window.
"""


def own_models() -> dict[str, list[str]]:
    """Return the names of the tiny models that our own decoder is compared with, by their architecture."""
    architectures = {name: model.__name__ for name, (_, model, _) in (FAMILIES | EXPERT_FAMILIES).items()}
    architectures |= {name: architecture for name, (architecture, _) in DENSE_FAMILIES.items()}
    architectures |= {name: recurrent_architecture(name) for name in RECURRENT_FAMILIES}
    architectures |= {
        name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for name, (model_type, _) in GEMMA_FAMILIES.items()
    }
    architectures |= {name: latent_architecture(name) for name in LATENT_FAMILIES}
    architectures |= dict.fromkeys(LLAMA4_MODELS, "Llama4ForCausalLM")
    models: dict[str, list[str]] = {}
    for name, architecture in sorted(architectures.items()):
        models.setdefault(architecture, []).append(name)
    return models


def render() -> str:
    """Return the page."""
    head = HEAD.format(
        by_name=by_name(),
        num_own=len(ARCHITECTURES),
        num_proven=len(TINY_MODELS),
        num_settings=len(SETTINGS),
        own="\n".join(_own_row(architecture, names) for architecture, names in sorted(own_models().items())),
    )
    served = "\n".join(_row(name, tiny) for name, tiny in sorted(TINY_MODELS.items()))
    by_reason: dict[str, list[str]] = {}
    by_part: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = "\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in by_reason.items())
    rows += f"\n| {NOT_TEXT_ONLY} | all other names that end with `{CONDITIONAL}` |"
    for name, part in REFUSED_TEXT_PARTS.items():
        by_part.setdefault(part, []).append(f"`{name}`")
    rows += "".join(f"\n| its text part is `{part}` | {', '.join(names)} |" for part, names in by_part.items())
    kinds = [(tiny.published, tiny.architecture, tiny.text_type) for tiny in TINY.values()]
    kinds += [(names, *types) for names, types in COMPARED_APART.items()]
    parts = [(published, name, TEXT_ARCHITECTURES[text_type]) for published, name, text_type in kinds]
    parts += [(published, kind.architecture, kind.part) for published, kind in OWN_CODE.items()]
    multimodal = "\n".join(_multimodal_row(*row) for row in parts)
    num_pairs = len(TEXT_PAIRS) + 2 * len(TINY)
    return (
        f"{head}{served}\n{MULTIMODAL_HEAD}{multimodal}\n{REFUSALS.format(rows=rows, num_pairs=num_pairs, **_gguf())}"
    )


def _gguf() -> dict[str, str]:
    """Return what the section about GGUF files lists."""
    pairs = {(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]) for architecture, kind, _ in GGUF_MODELS.values()}
    return {
        "gguf": "\n".join(f"| `{architecture}` | `{name}` |" for architecture, name in sorted(pairs)),
        "gguf_types": ", ".join(kind.name for kind in GGUF_TYPES.values()),
        "gguf_words": ", ".join(f"`{name}`" for name in sorted(filter(None, WORDS))),
    }


def _multimodal_row(published: str, architecture: str, part: str) -> str:
    default = "our own decoder" if part in ARCHITECTURES else "transformers' modules"
    return f"| {published} | `{architecture}` | `{part}` | {default} |"


def _own_row(architecture: str, names: list[str]) -> str:
    options = [_own_options(name) for name in names]
    windows = [option.get("sliding_window") for option in options] + [name for name in names if name in WINDOWED]
    family = ARCHITECTURES[architecture]
    recurrent = {
        "gated_delta": "gated delta nets",
        "kimi_delta": "Kimi delta attention",
        "mamba": "Mamba 2 layers",
        "conv": "short convolutions",
    }
    features = {
        recurrent.get(family.recurrent or "", ""): family.recurrent is not None,
        "latent attention": family.has_latents and family.index_rotation is None,
        "sparse latent attention": family.index_rotation is not None,
        "full attention": (family.recurrent is not None or family.has_chunks)
        and "full_attention" in family.layer_types
        and not family.has_latents,
        "chunked attention": family.has_chunks,
        "sliding windows": any(windows),
        "soft-caps": family.caps_attention,
        "experts": family.has_experts,
        "shared keys and values": any(option.get("num_kv_shared_layers") for option in options),
    }
    ranks = "2 and 4" if names[0] in SHARED_BY_RANKS else "by transformers' modules"
    if family.recurrent is not None or family.has_layer_heads or family.has_latents or family.has_chunks:
        ranks = "refused" if family.qk_norm == "projection" or family.has_altup else "2"
    return f"| `{architecture}` | {', '.join(names)} | {_listed(features)} | {ranks} |"


def _own_options(name: str) -> dict[str, Any]:
    if name in LATENT_FAMILIES:
        return LATENT_FAMILIES[name][1]
    if name in RECURRENT_FAMILIES:
        return RECURRENT_FAMILIES[name][1]
    if name in LLAMA4_MODELS:
        return LLAMA4_MODELS[name]
    if name in GEMMA_FAMILIES:
        return {"sliding_window": WINDOW} | GEMMA_FAMILIES[name][1]
    if name in DENSE_FAMILIES:
        architecture, options = DENSE_FAMILIES[name]
        return TINY_MODELS[architecture].options | options
    return (FAMILIES | EXPERT_FAMILIES)[name][2]


def _row(name: str, tiny: TinyModel) -> str:
    features = {
        "shared keys and values": "num_kv_shared_layers" in tiny.options,
        "sliding windows": "sliding_window" in tiny.options or name in {architecture for architecture, _ in WINDOWS},
        "soft-caps": "attn_logit_softcapping" in tiny.options,
        "sinks": name in WITH_SINKS,
        "experts": "num_experts" in str(tiny.options),
    }
    default = "our own decoder" if name in ARCHITECTURES else "transformers' modules"
    tokens = "`make test`" if name in FEW else "`make test-long`"
    if name in KINDS:
        tokens += f", {len(SETTINGS)} settings in `make test-{'long' if name == IN_EVERY_SETTING else 'all'}`"
    beams = "`make test`" if name in KINDS else "`make test-all`"
    ranks = "2" if name in TENSOR_PARALLEL else "refused"
    return f"| `{name}` | {default} | {_listed(features)} | {tokens} | {beams} | {ranks} |"


def _listed(features: dict[str, bool]) -> str:
    return ", ".join(feature for feature, is_there in features.items() if is_there) or "full attention"


if __name__ == "__main__":
    PAGE.write_text(render())

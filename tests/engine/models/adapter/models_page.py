"""docs/models.md: which architectures are served, by what, and how that was tested; and why others are refused.

python -m tests.engine.models.adapter.models_page     writes the page
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from engine.models.adapter.architectures import REFUSED, WITH_SINKS
from engine.models.families import ARCHITECTURES
from tests.engine.models.adapter.tiny_models import TINY_MODELS, TinyModel

PAGE = Path(__file__).parents[4] / "docs" / "models.md"

HEAD = """# Models

Pagoda serves decoder-only language models, from a Hugging Face checkpoint with safetensors. The name in `architectures`
of its config.json decides: our own decoder computes {num_own} architectures, fused and on CPUs in C, and the modules of
transformers compute {num_proven}, through our paged attention. Where both can, our own decoder does, unless it lacks
the model's activation or RoPE, or `engine.model_impl` says otherwise. An architecture that is not on this page is
refused when the engine starts.

This page is written by `python -m tests.engine.models.adapter.models_page`, and a test compares it with the code.

## Our own decoder

{own}.

They are compared with transformers' `generate` in `tests/engine/models/`, and so are tensor-parallel ranks, int8 and
every setting of the engine. On a CPU all of them run in the C kernels, soft-caps included. OLMo 2 and 3 are refused on
several tensor-parallel ranks: their norms of queries and keys are over all heads. Of experts only those that a token is
routed to are computed, in C on a CPU and in Triton on a GPU; int8 experts need the C kernels.

## transformers' modules

Continuous batching, chunked prefill, prefix caching, preemption, swapping, beams and failover are those of our own
decoder. Tensor parallelism and int8 are refused, and steps are slower. Weights are read into the host's memory before
they are copied to a GPU.

What was compared, with tiny random models in float32 on a CPU (`tests/engine/models/adapter/`):

- logits of every token, in packed steps of chunks and decodes, with those of transformers: within 1e-5 of the largest.
  With windows, contexts are more than twice as long;
- greedy tokens with those of `generate`, with blocks of 4 tokens, steps of 7 tokens, preempted requests, shared
  prefixes and a cached prompt. `make test` does this for more than a third of them, `make test-long` for the others,
  and for a few in 24 settings;
- beams with those of `generate`, for a few in `make test`, for the others in `make test-long`;
- for a few, logits in bfloat16 and float16: as near to float32 as those of transformers are;
- planted errors make the comparison fail: a window that is ignored, one too long or one too short, a scale, a soft-cap,
  sinks or the scaling of logits left out, positions off by one after a chunk's border.

Checkpoints of real size were not compared. Soft-caps need flash-attn or a CPU, and sinks need a CPU.

| architecture | attention and feed-forward |
| --- | --- |
"""

REFUSALS = """
## Refused

| why | architectures |
| --- | --- |
{rows}

Refused for any architecture:

- code of the checkpoint's own (`auto_map`), pickled weights, and quantised checkpoints;
- weights that do not fit the config.json: nothing that is missing is made up;
- LongRoPE beyond its original context: there transformers chooses the factors by the longest request of a batch, so
  one request would change the others. Set `engine.max_model_len` to the original context;
- with transformers' modules: layers that differ in their heads, and a mask that is neither causal nor a sliding window.
"""


def render() -> str:
    """Return the page."""
    head = HEAD.format(
        num_own=len(ARCHITECTURES),
        num_proven=len(TINY_MODELS),
        own=fill(", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)), 119, break_long_words=False),
    )
    served = "\n".join(f"| `{name}` | {_features(name, tiny)} |" for name, tiny in sorted(TINY_MODELS.items()))
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = "\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in by_reason.items())
    return f"{head}{served}\n{REFUSALS.format(rows=rows)}"


def _features(name: str, tiny: TinyModel) -> str:
    options = tiny.options
    features = {
        "sliding windows": "sliding_window" in options,
        "soft-caps": "attn_logit_softcapping" in options,
        "sinks": name in WITH_SINKS,
        "experts": "num_experts" in str(options),
    }
    return ", ".join(feature for feature, is_there in features.items() if is_there) or "full attention"


if __name__ == "__main__":
    PAGE.write_text(render())

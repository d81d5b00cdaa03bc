"""Sizes of a run: real models' shapes on a GPU, tiny ones to test the script on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.limits.model_shape import ModelShape

__all__ = ["FULL", "TINY", "LatentSizes", "RecurrentShape", "Sizes", "TokenLengths"]


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of the recurrent layers of some model.

    Attributes:
        conv: channels and width of a convolution.
        delta_rule: key heads, heads, key_dim and value_dim of a gated delta rule.
        scan: groups, heads, head_dim and state_size of Mamba 2.
    """

    conv: tuple[int, int]
    delta_rule: tuple[int, int, int, int]
    scan: tuple[int, int, int, int]


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention: of a rank's heads, of a token's latent, of a head, and of the indexer."""

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    top_k: int


QWEN3_0_6B = ModelShape(1024, 3072, 28, 16, 8, 128, 151936)
QWEN3_8B = ModelShape(4096, 12288, 36, 32, 8, 128, 151936)
QWEN3_MOE = ModelShape(2048, 8 * 768, 6, 32, 4, 128, 151936, 128, 8)  # 6 of the 48 layers of Qwen3-30B-A3B
TINY_SHAPE = ModelShape(64, 128, 2, 4, 2, 16, 512)
TINY_MOE = ModelShape(64, 2 * 48, 2, 4, 2, 16, 512, 6, 2)
RECURRENT = RecurrentShape((8192, 4), (16, 32, 128, 128), (8, 64, 64, 128))  # of Qwen3-Next, and Nemotron 3 Nano's scan
LATENT = LatentSizes(16, 512, 64, 128, 128, 64, 128, 2048)  # of DeepSeek V3.2, an eighth of its heads
TINY_LATENT = LatentSizes(4, 32, 16, 16, 16, 8, 32, 16)
TINY_RECURRENT = RecurrentShape((40, 3), (2, 4, 16, 24), (2, 4, 12, 16))


@dataclass(frozen=True)
class TokenLengths:
    """Requests whose lengths are drawn uniformly from ranges that include both ends."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of the workloads.

    Attributes:
        models: by the name of their checkpoint. Embeddings are shared with the LM head.
        max_model_len: of the engines that are timed.
        max_num_batched_tokens: likewise.
        copy_bytes, matmul_size: of the measurement of the machine's limits.
        decode_batches: sequences that decode at the same time.
        decode_context: tokens of each before the first decode.
        decode_steps: timed steps for each batch.
        arrivals: (sequences that decode, tokens of a prompt that arrives).
        prefills: (prompts, tokens of each), computed at the same time.
        attention: (num_heads, num_kv_heads, head_dim) of the attention kernels' checks.
        context: longest context of those checks.
        timed_attention: (sequences, context) of timed decode attention.
        speculation: numbers of streams, and tokens of each answer, that are decoded with the drafts of a smaller model.
        offline: nano-vllm's benchmark.
        options: the workload that compares engine options.
        peer: the workload that is run with transformers too.
        token_prompts: number of prompts whose greedy tokens are checked, and tokens of the longest.
        profiled: (sequences, context) of the decode steps that are profiled.
        recurrent: sizes of the recurrent layers that are checked and timed.
        recurrent_prefills: (prompts, tokens of each) that they are timed with.
        latent: sizes of the latent attention that is checked, and timed with ``timed_attention``.
        checked_expansion: (queries, context) of a prefill that is computed absorbed and expanded.
        timed_expansions: (heads, queries, context) of those that are timed.
    """

    models: dict[str, ModelShape]
    max_model_len: int
    max_num_batched_tokens: int
    copy_bytes: int
    matmul_size: int
    decode_batches: tuple[int, ...]
    decode_context: int
    decode_steps: int
    arrivals: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    attention: tuple[tuple[int, int, int], ...]
    context: int
    timed_attention: tuple[tuple[int, int], ...]
    speculation: tuple[tuple[int, ...], int]
    offline: TokenLengths
    options: TokenLengths
    peer: TokenLengths
    token_prompts: tuple[int, int]
    profiled: tuple[tuple[int, int], ...]
    recurrent: RecurrentShape
    recurrent_prefills: tuple[tuple[int, int], ...]
    latent: LatentSizes
    checked_expansion: tuple[int, int]
    timed_expansions: tuple[tuple[int, int, int], ...]


FULL = Sizes(
    models={"0.6b": QWEN3_0_6B, "8b": QWEN3_8B, "moe": QWEN3_MOE},
    max_model_len=40960,
    max_num_batched_tokens=8192,
    copy_bytes=4 * 2**30,
    matmul_size=8192,
    decode_batches=(1, 16, 64, 256),
    decode_context=1024,
    decode_steps=24,
    arrivals=((1, 128), (32, 128), (32, 480), (128, 250)),
    prefills=((1, 128), (16, 128), (64, 128), (256, 128), (1, 1024), (1, 8192), (1, 32768)),
    attention=((16, 8, 128), (32, 8, 128)),
    context=32768,
    timed_attention=((1, 1024), (1, 32768), (16, 1024), (16, 8192), (64, 1024), (256, 1024)),
    speculation=((1, 4, 16), 96),
    offline=TokenLengths(256, (100, 1024), (100, 1024)),
    options=TokenLengths(64, (256, 512), (64, 128)),
    peer=TokenLengths(64, (100, 512), (64, 256)),
    token_prompts=(24, 600),
    profiled=((1, 1024), (64, 1024), (256, 1024)),
    recurrent=RECURRENT,
    recurrent_prefills=((1, 8192), (16, 512)),
    latent=LATENT,
    checked_expansion=(700, 1500),
    timed_expansions=(
        *((16, 256, 8192), (16, 1024, 32768), (16, 8192, 131072)),  # those with the fewest programs
        *((16, 8192, 8192), (16, 8192, 32768), (128, 8192, 8192), (128, 8192, 32768)),
    ),
)
TINY = Sizes(
    models={"0.6b": TINY_SHAPE, "8b": TINY_SHAPE, "moe": TINY_MOE},
    max_model_len=512,
    max_num_batched_tokens=256,
    copy_bytes=2**20,
    matmul_size=128,
    decode_batches=(1, 4),
    decode_context=24,
    decode_steps=4,
    arrivals=((1, 12), (3, 20)),
    prefills=((1, 32), (2, 64)),
    attention=((4, 2, 16),),
    context=512,
    timed_attention=((1, 64), (4, 32)),
    speculation=((1, 2), 16),
    offline=TokenLengths(8, (8, 24), (8, 24)),
    options=TokenLengths(4, (16, 32), (4, 8)),
    peer=TokenLengths(3, (8, 16), (4, 8)),
    token_prompts=(8, 60),
    profiled=((2, 24),),
    recurrent=TINY_RECURRENT,
    recurrent_prefills=((1, 40), (2, 24)),
    latent=TINY_LATENT,
    checked_expansion=(40, 60),
    timed_expansions=((4, 40, 40), (3, 40, 60)),
)

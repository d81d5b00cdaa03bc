"""The whole engine on the device: greedy tokens against transformers, and throughput against the limit."""

from __future__ import annotations

import random
import tempfile
from time import perf_counter
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.sizes import Sizes
from benchmarks.machine import synchronize
from engine.llm import LLM
from engine.sampling_params import SamplingParams

__all__ = ["check_tokens", "measure_throughput"]

MAX_TOKENS = 24
_TOKENS_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}


def _save_random_model(directory: str, device: torch.device, dtype: torch.dtype, **shape: Any) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **shape,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        rope_theta=1e6,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    model.save_pretrained(directory)
    return model


def check_tokens(device: torch.device) -> dict[str, Any]:
    """Compare greedy tokens in float32, with shared prefixes, a small pool and a small budget."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 1024) for _ in range(300)]
    prompts = [[rng.randrange(3, 1024) for _ in range(rng.randint(1, 600))] for _ in range(12)]
    prompts += [shared + [rng.randrange(3, 1024) for _ in range(rng.randint(0, 200))] for _ in range(12)]
    with tempfile.TemporaryDirectory() as directory:
        model = _save_random_model(directory, device, torch.float32, **_TOKENS_SHAPE)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.mul_(4.0)  # so that attention is not flat and greedy decoding has no ties
        model.save_pretrained(directory)
        expected = [_transformers_answer(model, prompt, device) for prompt in prompts]
        results: dict[str, Any] = {"passed": True}
        for options in ({}, {"num_blocks": 48, "block_size": 16, "max_num_batched_tokens": 64}):
            llm = LLM(
                directory,
                dtype="float32",
                device=str(device),
                skip_tokenizer_init=True,
                kv_cache_memory=None if options else "64MiB",
                **options,
            )
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
                use_tqdm=False,
            )
            equal = [one.outputs[0].token_ids == answer for one, answer in zip(outputs, expected, strict=True)]
            results["small pool" if options else "default"] = {
                "prompts": len(prompts),
                "equal": sum(equal),
                "cached_tokens": sum(one.num_cached_tokens for one in outputs),
                "attention_backend": llm.engine.info.attention_backend,
            }
            results["passed"] &= all(equal)
    return results


def _transformers_answer(model: Qwen3ForCausalLM, prompt: list[int], device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def measure_throughput(device: torch.device, sizes: Sizes, limits: dict[str, float]) -> dict[str, Any]:
    """Measure output tokens/s at each batch size, beside transformers' generate and the bandwidth's limit.

    The limit counts the bytes that a decode step must read, weights and K and V, at the measured copy bandwidth.
    """
    shape = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": 8192,
    }
    with tempfile.TemporaryDirectory() as directory:
        model = _save_random_model(directory, device, torch.bfloat16, **shape)
        weight_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
        peers = {batch: _transformers_seconds(model, batch, sizes, device) for batch in sizes.batches[:2]}
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
        started = perf_counter()
        llm = LLM(
            directory,
            device=str(device),
            skip_tokenizer_init=True,
            max_num_seqs=max(sizes.batches),
            max_model_len=2048,
            enable_prefix_caching=False,
            max_num_batched_tokens=8192,
            kv_cache_memory=None if device.type == "cuda" else "64MiB",
        )
        results: dict[str, Any] = {"load_seconds": perf_counter() - started, "num_blocks": llm.engine.info.num_blocks}
        _our_seconds(llm, 2, sizes, 4)
        for batch in sizes.batches:
            first = _our_seconds(llm, batch, sizes, 1)
            seconds = _our_seconds(llm, batch, sizes, sizes.output_tokens)
            step = (seconds - first) / (sizes.output_tokens - 1)
            context = sizes.prompt_tokens + sizes.output_tokens // 2
            step_bytes = weight_bytes + 4 * batch * context * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
            results[f"batch {batch}"] = {
                "output_tokens_per_second": batch * sizes.output_tokens / seconds,
                "prefill_tokens_per_second": batch * sizes.prompt_tokens / first,
                "decode_step_milliseconds": step * 1e3,
                "decode_share_of_bandwidth": step_bytes / (limits["copy_gb_s"] * 1e9) / step,
                "ratio_to_transformers": peers[batch] / seconds if batch in peers else None,
            }
    return results


def _prompts(batch: int, sizes: Sizes) -> list[list[int]]:
    rng = random.Random(batch)
    return [[rng.randrange(3, sizes.vocab_size) for _ in range(sizes.prompt_tokens)] for _ in range(batch)]


def _our_seconds(llm: LLM, batch: int, sizes: Sizes, output_tokens: int) -> float:
    prompts = _prompts(batch, sizes)
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    started = perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return perf_counter() - started


def _transformers_seconds(model: Qwen3ForCausalLM, batch: int, sizes: Sizes, device: torch.device) -> float:
    ids = torch.tensor(_prompts(batch, sizes), device=device)
    count = sizes.output_tokens

    def generate(tokens: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
        )
        synchronize(device)

    generate(2)
    started = perf_counter()
    generate(count)
    return perf_counter() - started

"""vLLM's CPU build: `PYTHON -m benchmarks.peers.vllm MODEL WORKLOAD ...`, PYTHON being one that has vLLM."""

from __future__ import annotations

import os

from benchmarks.peers import runner
from benchmarks.workloads import Request, Workload

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": str(runner.KV_CACHE_GIB),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as ours is
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def load(model: str, workloads: list[Workload]) -> runner.Generate:
    """Load the model as vLLM does by default, which compiles it."""
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=runner.MAX_MODEL_LEN,
        max_num_seqs=runner.MAX_NUM_SEQS,
        max_num_batched_tokens=runner.MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=True,
    )

    def generate(requests: list[Request]) -> int:
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.out, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        return sum(len(item.outputs[0].token_ids) for item in llm.generate(prompts, params, use_tqdm=False))

    return generate


if __name__ == "__main__":
    runner.main("vllm", load)

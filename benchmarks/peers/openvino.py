"""OpenVINO GenAI's continuous batching on a CPU: `PYTHON -m benchmarks.peers.openvino EXPORTED_MODEL WORKLOAD ...`."""

from __future__ import annotations

from itertools import count

from benchmarks.peers import runner
from benchmarks.workloads import Request, Workload


def load(model: str, workloads: list[Workload]) -> runner.Generate:
    """Load a model that optimum-cli has exported."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = runner.KV_CACHE_GIB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = runner.MAX_NUM_SEQS
    scheduler.max_num_batched_tokens = runner.MAX_NUM_BATCHED_TOKENS
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    request_ids = count()

    def greedy(num_tokens: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        return config

    def generate(requests: list[Request]) -> int:
        handles = []
        for request in requests:
            ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))  # [1, prompt tokens]
            handles.append(pipeline.add_request(next(request_ids), ids, greedy(request.out)))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(answer.generated_ids) for handle in handles for answer in handle.read_all())

    return generate


if __name__ == "__main__":
    runner.main("openvino", load)

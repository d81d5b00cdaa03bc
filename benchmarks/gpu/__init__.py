"""Checks that need a GPU: kernels against references, tokens against transformers, throughput against limits.

Knows the kernels and the offline LLM; knows nothing of Ray, HTTP or checkpoints, since its models have random weights.
"""

"""Checks that need a GPU: kernels against references, tokens against transformers, speed against limits.

check.py runs the parts of parts/, each in a process of its own. They know the kernels and the offline LLM, and nothing
of Ray, HTTP or real checkpoints: their models have random weights.
"""

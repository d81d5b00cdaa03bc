"""Our own decoder: Llama-shaped families and mixtures of experts, on torch's operators or the C kernels of CPUs.

Knows layers, their weights and a step's batch as tensors. Does not know checkpoint files, sequences or blocks.
"""

"""A step on the device: the batch as tensors, the model's forward pass, ranks of a tensor-parallel engine.

Knows tensors and processes. Does not know which sequences are scheduled, nor why.
"""

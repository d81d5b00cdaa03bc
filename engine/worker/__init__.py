"""A step on the device: the batch as tensors, the forward pass, and the ranks of a tensor-parallel engine.

Knows tensors, processes and memory. Does not know how the scheduler chooses the sequences of a step.
"""

"""Models: reads a checkpoint's config and weights, and computes it on torch's operators or the C kernels.

The subpackage adapter/ computes what our own decoder does not know, on transformers' modules.

This room knows checkpoints, tensor-parallel ranks and decoders. It does not know sequences, blocks or requests: a
step's batch comes as tensors and a ForwardContext.
"""

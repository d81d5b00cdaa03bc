"""Models: reads a checkpoint's config and weights, and computes it on torch's operators or the C kernels.

This room knows checkpoints, tensor-parallel ranks and decoders. It knows no sequences, blocks or requests: a step's
batch comes as tensors and a ForwardContext.
"""

"""Checkpoint files to tensors: safetensors headers, reading ahead, each rank's shard, and errors that name a tensor.

Knows files, tensors and ranks. Does not know what a layer computes.
"""

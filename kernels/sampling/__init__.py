"""Choosing tokens from logits on a GPU: the most likely ones, and draws from those that top-k, top-p and min-p keep.

They know rows of logits, keys of noise and parameters as tensors, and nothing about sequences.
"""

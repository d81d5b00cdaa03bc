"""Matrix products of a linear layer.

Knows tensors. Does not know which layer of a model a weight belongs to.
"""

"""Linear layers: how their weights are kept, and the product with them. registry.py lists the methods.

Knows tensors. Does not know which layer of a model a weight belongs to.
"""

"""The draft model, or the MTP layer: its weights, its part of the KV cache, and the tokens that it samples.

Knows tensors. Does not know which sequences get drafts, nor how many tokens are worth drafting.
"""

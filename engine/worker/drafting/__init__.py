"""The draft model, the MTP layer or the EAGLE-3 head: its weights, its part of the KV cache, and its tokens.

Knows tensors. Does not know which sequences get drafts, nor how many tokens are worth drafting.
"""

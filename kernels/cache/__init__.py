"""Writes of a step: keys and values to their slots of the paged cache, and sampled tokens to their placeholders.

Knows tensors and slots. Does not know which sequence a slot belongs to.
"""

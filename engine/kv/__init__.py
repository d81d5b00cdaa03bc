"""The KV cache: which block belongs to which sequence, which prefixes can be reused, and the tensors themselves.

Knows blocks, tokens and hashes. Does not know scheduling policy, models or sampling.
"""

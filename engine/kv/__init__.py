"""The paged KV cache: block tables, the prefix cache, swapped-out blocks, and the tensors of keys and values.

Knows blocks, tokens and hashes. Does not know scheduling policy, models or sampling.
"""

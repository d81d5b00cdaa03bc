"""Adapter: serves architectures that our own decoder does not know, on the modules of transformers.

It knows transformers' models and how they ask for attention. A ForwardContext gives it the attention backend and the KV
cache, as it gives them to our own decoder.
"""

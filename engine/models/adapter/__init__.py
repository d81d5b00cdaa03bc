"""Adapter: serves architectures that our own decoder does not know, on the modules of transformers.

It knows transformers' models and how they ask for attention. Which attention backend computes it, and where keys and
values lie, it is told by a ForwardContext, as our own decoder is.
"""

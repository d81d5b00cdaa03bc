"""Paged attention by the flash-attn packages, which this room imports only when a backend is chosen.

It translates our batches into their arguments and computes nothing but what these need.
"""

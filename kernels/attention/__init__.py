"""Attention over the paged KV cache: one interface and several backends, chosen once when an engine starts.

This room knows queries, caches and block tables; it does not know layers, models or sequences' tokens. registry.py
lists the backends, needs no torch, and says how to add one.
"""

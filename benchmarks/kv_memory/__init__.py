"""How much of a KV pool holds tokens: contiguous and paged memory under the same queue, and what shared blocks save.

Knows lengths of requests and the engine's scheduler and block manager; knows nothing of models, tensors or devices.
"""

"""A checkpoint's config.json to our own config: families, shapes, RoPE, experts, and the limits of plausible values.

Knows the keys of config.json and transformers' defaults. Reads no weights and imports no torch.
"""

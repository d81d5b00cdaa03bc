"""A checkpoint's config.json to our own config: families, shapes, RoPE, experts, and the limits of plausible values.

Knows the keys of config.json and transformers' defaults. Reads no weights. The files of this folder choose the
implementation and describe a whole model. They import the four folders below, and none of these imports upward:
files and shapes read values and families; neither knows the other.
"""

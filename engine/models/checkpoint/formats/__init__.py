"""Formats of quantised weights: which stored tensors are one weight, and its values. table.py lists the formats.

Each format finds its weights by the names and dtypes of tensors of one module, and gives a PackedWeight for each; the
arithmetic is in kernels/dequant. Knows nothing about layers and models.
"""

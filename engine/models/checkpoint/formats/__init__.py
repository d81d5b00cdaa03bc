"""Formats of quantised weights: which stored tensors are one weight, and its values.

table.py lists the formats of safetensors. Each finds its weights among the tensors of one module, by their names,
dtypes and shapes, and takes from the checkpoint's config what these do not say. It gives a PackedWeight for each, whose
arithmetic is in kernels/dequant. gguf.py does so for all tensors of a GGUF file. Knows how experts are named and
stacked, and nothing else about models.
"""

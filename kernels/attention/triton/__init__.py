"""Paged attention in Triton. It knows pointers, tiles and splits of the context; kernels of layers are in layer_ops."""

"""The writes of kernels/cache in Triton. Knows pointers and strides."""

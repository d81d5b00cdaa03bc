"""The layer operations in Triton: kernels.py, and ops.py, which launches them."""
